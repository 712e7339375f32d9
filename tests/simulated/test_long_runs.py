"""Runs of more requests than a record keeps."""

from __future__ import annotations

import msgspec
import pytest
from infermix.measure import thin as thinning
from infermix.measure.metrics import repeat_figures, summarise
from infermix.measure.repeat import simulate_repeat
from infermix.record.record import Repeat
from simulation import load, simulated


def test_a_thinned_repeat_keeps_the_figures_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinning, "MOST_REQUESTS", 10)
    repeat = simulate_repeat(simulated(detail="requests"), load(95, 5.0), None)
    limits = {"ttft_s": 1.0}
    before = repeat_figures(repeat, limits)
    thinning.thin(repeat, limits)
    assert len(repeat.requests) == 10
    assert repeat.requests[0].request_id == "0"
    again = msgspec.json.decode(msgspec.json.encode(repeat), type=Repeat)
    metrics = summarise([again], limits)
    assert {name: metrics[name].value for name in before} == pytest.approx(before)
    assert metrics["requests"].value == 95


def test_shorter_ones_are_left_alone() -> None:
    repeat = simulate_repeat(simulated(), load(5, 5.0), None)
    thinning.thin(repeat, {})
    assert len(repeat.requests) == 5
    assert repeat.figures == {}
