"""Figures of drafting, by hand."""

from __future__ import annotations

import pytest
from infermix.measure.metrics import summarise
from infermix.measure.speculation import speculation, speculation_metric
from infermix.record.record import Repeat

#: Three rounds of three drafts (3, 1 and 0 accepted) and one plain step, in two target forwards.
COUNTERS = {
    "verifications": 4.0,
    "target_forwards": 2.0,
    "verified_tokens": 8.0,
    "draft_tokens": 9.0,
    "accepted_draft_tokens": 4.0,
    "draft_forwards": 6.0,
    "draft_s": 0.5,
    **{f"drafted_at_{position}": 3.0 for position in (1, 2, 3)},
    "accepted_at_1": 2.0,
    "accepted_at_2": 1.0,
    "accepted_at_3": 1.0,
}


def test_by_hand() -> None:
    assert speculation(COUNTERS, wall_s=2.0) == pytest.approx(
        {
            "acceptance_rate": 4 / 9,
            "mean_acceptance_length": 2.0,
            "tokens_per_target_forward": 4.0,
            "draft_tokens_per_verification": 9 / 4,
            "draft_forwards_per_target_forward": 3.0,
            "acceptance_rate_at_1": 2 / 3,
            "acceptance_rate_at_2": 1 / 3,
            "acceptance_rate_at_3": 1 / 3,
            "draft_time_share": 0.25,
        }
    )


def test_one_sample_per_repeat_with_units() -> None:
    repeat = Repeat(wall_s=2.0, requests=[], environment={"counters": COUNTERS})
    found = summarise([repeat, repeat])
    assert found["mean_acceptance_length"].samples == [2.0, 2.0]
    assert found["mean_acceptance_length"].unit == "tokens"
    assert (found["acceptance_rate_at_2"].unit, found["acceptance_rate_at_2"].better) == ("", "higher")


def test_absent_without_drafting() -> None:
    assert speculation({"steps": 5.0}, wall_s=2.0) == {}


def test_no_rate_of_nothing() -> None:
    assert speculation(dict.fromkeys(COUNTERS, 0.0), wall_s=2.0) == {"draft_time_share": 0.0}


def test_figures_of_categories() -> None:
    counted = {"verifications[qa]": 10.0, "verified_tokens[qa]": 25.0, "draft_tokens[qa]": 30.0}
    counted["accepted_draft_tokens[qa]"] = 15.0
    found = speculation({**COUNTERS, **counted, "verifications[rag]": 0.0}, wall_s=2.0)
    assert (found["mean_acceptance_length[qa]"], found["acceptance_rate[qa]"]) == (2.5, 0.5)
    assert not any("rag" in name for name in found)
    assert speculation_metric("acceptance_rate[qa]") == ("", "higher")
