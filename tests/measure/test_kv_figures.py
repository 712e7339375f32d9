"""Figures of the KV memory, worked by hand, and read from an engine that runs."""

from __future__ import annotations

import pytest
from infermix.cell.roofline import _computed_share
from infermix.measure.kv_figures import KV_FIGURES, kv_figures
from infermix.measure.metrics import summarise
from infermix.record.record import Repeat


def repeat(**counters: float) -> Repeat:
    return Repeat(wall_s=1.0, requests=[], environment={"counters": counters})


SLOTS = {
    "allocated_tokens_sum": 200.0,
    "reserved_tokens_sum": 180.0,
    "used_tokens_sum": 150.0,
    "kv_fragmentation_max": 0.5,
}


def test_fragmentation_is_the_share_of_slots_without_a_token() -> None:
    figures = kv_figures(repeat(**SLOTS))
    assert figures == {
        "kv_fragmentation_mean": pytest.approx(0.25),
        "kv_fragmentation_max": 0.5,
        "kv_tail_waste_mean": pytest.approx(0.1),
    }


def test_hits_over_the_prompt_tokens_of_requests_that_were_let_in() -> None:
    counters = {
        "prefix_queried_tokens": 400.0,
        "prefix_hit_tokens": 100.0,
        "prefix_hits": 2.0,
        "kv_copied_blocks": 3.0,
    }
    figures = kv_figures(repeat(**counters))
    assert figures == {
        "prefix_hit_rate": 0.25, "prefix_hits": 2.0, "prefix_hit_tokens": 100.0, "kv_copied_blocks": 3.0
    }  # fmt: skip


def test_what_was_dropped_and_moved_is_told_where_it_happened() -> None:
    dropping = {"kv_ended_tokens": 40.0, "kv_dropped_tokens": 30.0}
    swaps = {"swap_stall_s": 0.5, "swap_out_bytes_per_s": 4.0, "swap_in_bytes_per_s": 2.0}
    assert kv_figures(repeat(**dropping, preemptions=2.0, swaps_out=1.0, **swaps)) == {
        "kv_kept_fraction": 0.25, "kv_dropped_tokens": 30.0, "preemptions": 2.0, **swaps
    }  # fmt: skip
    assert kv_figures(repeat(preemptions=0.0, swaps_out=0.0, **swaps)) == {}


@pytest.mark.parametrize("counters", [{}, {"allocated_tokens_sum": 0.0}, {"prefix_queried_tokens": 0.0}])
def test_an_engine_that_does_not_count_has_no_figures(counters: dict[str, float]) -> None:
    assert kv_figures(repeat(**counters)) == {}


def test_they_are_metrics_with_units() -> None:
    metrics = summarise([repeat(**SLOTS, prefix_queried_tokens=8.0, prefix_hit_tokens=4.0)] * 3)
    assert {name: (metric.unit, metric.better) for name, metric in metrics.items() if name in KV_FIGURES} == {
        name: KV_FIGURES[name] for name in (*kv_figures(repeat(**SLOTS)), "prefix_hit_rate", "prefix_hit_tokens")
    }


def test_tokens_from_a_cache_are_no_work() -> None:
    hit = repeat(prefix_queried_tokens=400.0, prefix_hit_tokens=300.0)
    assert _computed_share([hit, repeat(prefix_queried_tokens=400.0, prefix_hit_tokens=100.0)]) == 0.5
    assert _computed_share([repeat(), repeat()]) == 1.0
