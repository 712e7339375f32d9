"""Files that options name: found and judged before anything starts, and known by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import infermix
import pytest
from infermix import cli
from infermix.compose import CellPlan
from infermix.errors import UserError
from infermix.workload import prompts

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "torch_dtype": "float32",
}  # fmt: skip
HEAD = "model: {source: tiny.json, weights: dummy}\ndevice: cpu\n"
PROMPTS = HEAD + "workload: {use: prompts, path: p.jsonl}\n"

Plan = Callable[..., list[CellPlan]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(CONFIG))

    def of(text: str, *lines: str) -> list[CellPlan]:
        Path("x.yaml").write_text(text)
        Path("p.jsonl").write_text("\n".join(lines))
        return infermix.plan("x.yaml")

    return of


def fault(plan: Plan, *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        plan(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "a",}', "p.jsonl:2:16: not JSON"),
        ('{"prompt": ""}', "p.jsonl:2:1: the prompt is empty"),
        ('  {"promt": "a"}', "p.jsonl:2:3: no field 'prompt or text or messages or turns'"),
        ("[" * 100_000, "p.jsonl:2:1: not JSON that can be read"),
        ('{"prompt": "ab\\ud800"}', "p.jsonl:2:1: the prompt holds half a character, the lone surrogate U+D800"),
        (
            '{"messages": [{"role": "user", "content": "\\udc00"}]}',
            "p.jsonl:2:1: the prompt holds half a character, the lone surrogate U+DC00 (character 1)",
        ),
    ],
)
def test_bad_lines_are_one_error_of_the_experiment(plan: Plan, line: str, expected: str) -> None:
    text = fault(plan, PROMPTS + "sweep: {parts.kv: [dense, paged]}\n", '{"prompt": "fine"}', line)
    assert text.startswith(expected)
    assert len(text.splitlines()) == 1


def test_faults_of_whole_files_name_the_option(plan: Plan) -> None:
    assert fault(plan, HEAD + "workload: {use: prompts, path: q.jsonl}\n") == (
        "x.yaml:3:32: workload.path: q.jsonl: there is no such file"
    )
    corpus = HEAD + "workload: {use: synthetic}\nquality: [{use: perplexity, corpus: none.txt}]\n"
    assert fault(plan, corpus).startswith("x.yaml:4:11: quality[0]: none.txt: there is no such corpus file")
    assert fault(plan, HEAD + "workload: {use: corpus, path: none.txt}\n").startswith(
        "x.yaml:3:11: workload: none.txt"
    )
    tasks = HEAD + "workload: {use: synthetic}\nquality: [{use: lm_eval, tasks: [a], include_path: none}]\n"
    assert fault(plan, tasks).startswith("x.yaml:4:52: quality[0].include_path: there is no folder 'none'")
    assert fault(plan, PROMPTS).startswith("x.yaml:3:11: workload: p.jsonl: there are no prompts")


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_the_commands_exit_with_2(plan: Plan, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan(PROMPTS, '{"prompt": "fine"}')
    Path("p.jsonl").write_text("nonsense")
    assert cli.main([verb, "x.yaml"]) == 2
    assert "p.jsonl:1:1: not JSON" in capsys.readouterr().err
    assert not Path("results").exists()


def test_a_file_is_read_once_for_all_cells(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    really = prompts.read_lines

    def read_lines(path: Path) -> list[prompts.Line]:
        read.append(path)
        return really(path)

    monkeypatch.setattr(prompts, "read_lines", read_lines)
    plan(PROMPTS + "sweep: {parts.kv: [dense, paged], seed: [1, 2]}\n", '{"prompt": "a"}')
    assert read == [Path("p.jsonl")]


def test_cells_know_their_data_by_content(plan: Plan) -> None:
    line = '{"prompt": "a"}'
    text = PROMPTS + "quality: [{use: perplexity, corpus: p.jsonl}]\n"
    (cell,) = plan(text, line)
    digest = hashlib.sha256(line.encode()).hexdigest()
    assert cell.cell.data == {"workload.path": digest, "quality[0].corpus": digest}
