"""`infermix show`, `infermix leaderboard`, and pretty units."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from pathlib import Path

import pytest
from infermix.commands import leaderboard as leaderboard_command
from infermix.commands.show import describe
from infermix.errors import UserError
from infermix.record.record import Record, Repeat, RequestSample
from infermix.record.store import write_record
from infermix.report import render
from rich.console import Console


def printed(record: Record, full: bool = False) -> str:
    console = Console(file=io.StringIO(), width=160)
    for block in describe(record, full):
        console.print(block)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def rich_record(make_record) -> Record:
    samples = [
        RequestSample(
            request_id=str(i),
            arrival_s=0.0,
            sent_s=0.0,
            input_tokens=5,
            emissions=[(0.1 + i / 100, 1), (0.2 + i / 100, 1), (0.4 + i / 100, 2)],
            finish_reason="length",
        )
        for i in range(20)
    ]
    record = make_record(
        repeats=[Repeat(wall_s=1.0, requests=samples)],
        outputs=[{"text": f"output {i} [bold]"} for i in range(5)],
        log=[f"line {i}" for i in range(60)],
        self_check={"max_relative_error": 1e-6},
        phases_s={"load": 1.5},
    )
    record.parts["attention"].via = {"kv:paged": "gather"}
    record.parts["attention"].executed = {"class": "SdpaAttention", "kernel": {"decode": "flash"}}
    return record


def test_show_holds_everything(rich_record: Record) -> None:
    text = printed(rich_record)
    for part in (
        "demo: attention=sdpa",
        "kv:paged via gather",
        "kernel.decode: flash",
        "output_tokens_per_s",
        "perplexity[topics,w512]",
        "drift",
        "500 MB",
        "46.1 kB",
        "max_relative_error",
        "load_s",
        "1.50 s",
        "machine.fingerprint",
        "TTFT, 20 values",
        "ITL, 40 values",
        "output 2 [bold]",
        "line 59",
        "last 40 of 60 lines",
    ):
        assert part in text, part
    assert "output 3" not in text
    assert "line 10" not in text
    assert "line 10" in printed(rich_record, full=True)


def test_show_of_a_failed_cell(make_record) -> None:
    text = printed(make_record(None, state="oom", reason="no memory", guards=[], memory={}, roofline={}, parts={}))
    assert "oom no memory" in text


def leaderboard(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    leaderboard_command.add_arguments(parser)
    return leaderboard_command.execute(parser.parse_args([str(argument) for argument in arguments]))


def test_leaderboard_command(make_record, tmp_path: Path, capsys) -> None:
    write_record(make_record(), tmp_path / "results")
    (tmp_path / "results" / "bad.json").write_text("{")
    assert leaderboard(tmp_path / "results", "--out", tmp_path / "out") == 0
    assert "bad.json" in capsys.readouterr().err
    text = (tmp_path / "out" / "LEADERBOARD.md").read_text()
    assert "skipped bad.json" in text
    assert str(tmp_path) not in text
    assert leaderboard(tmp_path / "results") == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    assert leaderboard(tmp_path / "results") == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()} == first


def test_leaderboard_of_nothing(tmp_path: Path, capsys) -> None:
    assert leaderboard(tmp_path) == 0
    assert "no complete records" in capsys.readouterr().out
    with pytest.raises(UserError, match="no such file"):
        leaderboard(tmp_path / "nowhere")


def test_publishing_imports_no_torch(make_record, tmp_path: Path) -> None:
    write_record(make_record(), tmp_path)
    script = (
        "import argparse, sys, pathlib\n"
        "from infermix.commands import compare, leaderboard, show\n"
        f"leaderboard.execute(argparse.Namespace(directory=pathlib.Path({str(tmp_path)!r}), out=None, rows=5))\n"
        "assert not {'torch', 'transformers', 'triton'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (render.seconds(0.0123), "12.3 ms"),
        (render.seconds(4.56e-5), "45.6 us"),
        (render.seconds(1.5), "1.50 s"),
        (render.seconds(3e-9), "3.00 ns"),
        (render.seconds(0), "0 s"),
        (render.size(1_677_721_600), "1.68 GB"),
        (render.size(960), "960 B"),
        (render.size(46080), "46.1 kB"),
        (render.number(6248.3), "6,248"),
        (render.number(0.0123), "0.01230"),
        (render.number(0), "0"),
        (render.number(99.999), "100.00"),
        (render.number(1234567), "1,234,567"),
        (render.signed_percent(-0.0512), "-5.1 %"),
        (render.times(1.234), "1.23x"),
    ],
)
def test_pretty_units(text: str, expected: str) -> None:
    assert text == expected


def test_histogram_counts_everything() -> None:
    lines = render.histogram([0.1, 0.1, 0.5, 1.0], render.seconds, bins=3)
    assert [int(line.split()[-1]) for line in lines] == [2, 1, 1]
    assert render.histogram([1.0, 1.0], render.seconds)[0].endswith(" 2")
