"""`infermix find-rate` over an engine that is always fast enough, or never."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import infermix.api
import pytest
from infermix.cli import main
from infermix.record.store import scan_records

WORKLOAD = {
    "use": "synthetic",
    "num_requests": 4,
    "input_tokens": 3,
    "output_tokens": 3,
    "arrivals": {"use": "poisson", "request_rate": 1},
}


@pytest.fixture(autouse=True)
def with_fakes(monkeypatch: pytest.MonkeyPatch, plugin: str) -> None:
    monkeypatch.setattr(infermix.api, "run", partial(infermix.api.run, extra_plugins=(plugin,)))


def find(experiment: Callable[..., Path], out: Path, *arguments: str, ttft_s: float, **keys: Any) -> int:
    measure = {"repeats": 2, "warmup": 0, "time_limit_s": 60, "goodput": {"ttft_s": ttft_s}}
    path = experiment(**{"workload": WORKLOAD, "measure": measure, **keys})
    return main(["find-rate", str(path), "--out", str(out), "--max-repeats", "2", *arguments])


def test_every_rate_is_a_record_and_the_answer_a_sentence(
    experiment: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert find(experiment, out, "--low", "50", "--high", "80", ttft_s=30.0) == 0
    assert "80 requests/s, the highest that was allowed, still keep 90%" in capsys.readouterr().out
    records = scan_records(out).records
    rates = sorted(record.experiment["workload"]["options"]["arrivals"]["request_rate"] for record in records)
    assert rates == [50.0, 80.0]
    assert all(record.experiment["workload"]["options"]["vary"] for record in records)


def test_limits_that_nothing_meets(
    experiment: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find(experiment, tmp_path / "out", "--low", "50", ttft_s=1e-9) == 1
    told = capsys.readouterr()
    assert "not even 50 requests/s keep 90% of the requests within the limits" in told.out
    assert "50 requests/s: goodput share 0.000, 0.000" in told.err


def test_one_repeat_is_said_to_give_no_interval(
    experiment: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = {"repeats": 1, "warmup": 0, "time_limit_s": 60, "goodput": {"ttft_s": 30.0}}
    given = ("--low", "50", "--high", "50", "--max-repeats", "1")
    assert find(experiment, tmp_path / "out", *given, ttft_s=30.0, measure=measure) == 0
    told = capsys.readouterr().out
    assert "not certain: one repeat gives no interval (--max-repeats 2 or more allows one)" in told


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"measure": {"repeats": 2}}, "measure.goodput: no limits are stated"),
        ({"workload": {**WORKLOAD, "arrivals": None}}, "workload.arrivals: a rate can only be searched where"),
        ({"sweep": {"seed": [1, 2]}}, "one cell is needed, these are 2: seed=1, seed=2 (choose one with --only)"),
    ],
)
def test_what_cannot_be_searched(
    experiment: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: Any, fault: str
) -> None:
    assert find(experiment, tmp_path / "out", ttft_s=1.0, **keys) == 2
    assert fault in capsys.readouterr().err
