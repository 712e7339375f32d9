"""An outsider's package, installed beside InferMix: listed, checked, mixed with our parts, run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "example_plugin"

EXPERIMENT = """\
model: {model}
workload: {{use: synthetic, num_requests: 6, input_tokens: {{use: uniform, min: 4, max: 40}}, output_tokens: 6}}
measure: {{repeats: 1, warmup: 0, max_warmup: 0}}
limits: {{num_threads: 1}}
sweep:
  parts.scheduler: [continuous, {{use: shortest_prompt, max_num_seqs: 2}}]
  parts.kv: [dense, paged]
"""

CONFORMANCE = """\
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.toolkit.conformance import check_component, check_scheduler
component = load_catalogue().find(Role.SCHEDULER, "shortest_prompt").component
check_component(component)
check_scheduler(component)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("outsider") / "site"
    pip = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(target),
    ]
    installed = python(*pip, str(EXAMPLE), site=target)
    assert installed.returncode == 0, installed.stderr
    return target


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("tiny_model")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def python(*arguments: str, site: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_it_conforms(site: Path) -> None:
    checked = python("-c", CONFORMANCE, site=site)
    assert checked.returncode == 0, checked.stderr


def test_it_is_listed_with_its_origin(site: Path) -> None:
    listed = python("-m", "infermix.cli", "plugins", "scheduler", site=site)
    assert "shortest_prompt: the shortest waiting prompt starts first" in listed.stdout
    assert "from infermix-example 0.0.1 (infermix_example)" in listed.stdout


def test_it_runs_beside_our_parts(site: Path, tiny_model: Path, tmp_path: Path) -> None:
    experiment = tmp_path / "outsider.yaml"
    experiment.write_text(EXPERIMENT.format(model=tiny_model))
    ran = python(
        "-m", "infermix.cli", "run", str(experiment), "--out", "out", "--no-ceilings", site=site, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    records = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("outsider-*.json")]
    assert [record["state"] for record in records] == ["ok"] * 4
    theirs = [record for record in records if record["parts"]["scheduler"]["name"] == "shortest_prompt"]
    assert {record["parts"]["scheduler"]["executed"]["class"] for record in theirs} == {
        "infermix_example_scheduler.ShortestPromptScheduler"
    }
    assert {record["parts"]["scheduler"]["distribution"] for record in theirs} == {"infermix-example"}
    first, *others = [
        sorted(output["request_id"] + str(output["token_ids"]) for output in r["outputs"]) for r in records
    ]
    assert first
    assert others == [first] * 3, "the order of service changed the tokens"
