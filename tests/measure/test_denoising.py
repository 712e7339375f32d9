"""Figures of filling in masks, by hand."""

from __future__ import annotations

import pytest
from infermix.measure.denoising import denoising
from infermix.measure.metrics import summarise
from infermix.record.record import Repeat

#: Two sequences of ten tokens, one of which took five steps, the other four, side by side.
COUNTERS = {
    "denoising_forwards": 5.0,
    "denoising_steps": 9.0,
    "unmasked_tokens": 20.0,
    "remasked_tokens": 60.0,
    "canvas_tokens": 300.0,
}


def test_by_hand() -> None:
    assert denoising(COUNTERS) == pytest.approx(
        {
            "tokens_per_denoising_step": 20 / 9,
            "tokens_per_denoising_forward": 4.0,
            "remasked_share": 0.75,
            "computed_per_unmasked_token": 15.0,
        }
    )


def test_one_sample_per_repeat_with_units() -> None:
    found = summarise([Repeat(wall_s=2.0, requests=[], environment={"counters": COUNTERS})] * 2)
    metric = found["tokens_per_denoising_forward"]
    assert (metric.samples, metric.unit, metric.better) == ([4.0, 4.0], "tokens", "higher")


@pytest.mark.parametrize("counters", [{}, {"steps": 3.0}, dict.fromkeys(COUNTERS, 0.0)])
def test_absent_without_it(counters: dict[str, float]) -> None:
    assert denoising(counters) == {}
