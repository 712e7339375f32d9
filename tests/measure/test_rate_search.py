"""Searching the largest rate: against systems whose answer is known."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from infermix.errors import UserError
from infermix.measure.rate_search import goodput_share, search_rate
from infermix.record.record import Repeat, RequestSample


def system(
    capacity: float, noise: float = 0.0
) -> tuple[Callable[[float, int], list[float]], list[tuple[float, int]]]:
    """All requests are good up to `capacity`; beyond it the share falls as capacity / rate."""
    random, asked = Random(0), []

    def probe(rate: float, repeats: int) -> list[float]:
        asked.append((rate, repeats))
        return [min(1.0, capacity / rate) + random.uniform(-noise, noise) for _ in range(repeats)]

    return probe, asked


@pytest.mark.parametrize("capacity", [0.7, 5.0, 37.3])
def test_the_bracket_holds_the_answer_and_is_narrow(capacity: float) -> None:
    probe, asked = system(capacity)
    found = search_rate(probe, share=0.8, low=0.5, high=1000.0, tolerance=0.02)
    assert found.rate is not None
    assert found.fails_at is not None
    assert found.rate <= capacity / 0.8 < found.fails_at <= 1.02 * found.rate
    assert found.certain
    assert len(asked) <= 16


def test_noise_asks_for_more_repeats_where_it_matters() -> None:
    probe, asked = system(10.0, noise=0.15)
    found = search_rate(probe, share=0.9, low=1.0, high=100.0, tolerance=0.05, repeats=3, max_repeats=12)
    assert found.rate == pytest.approx(10 / 0.9, rel=0.15)
    near = {repeats for rate, repeats in asked if 9 < rate < 13}
    assert max(near) == 12, "the interval near the answer contains the share"
    assert (1.0, 3) in asked
    assert not found.certain


def test_one_repeat_is_never_certain() -> None:
    found = search_rate(system(10.0)[0], share=0.9, low=1.0, high=2.0, repeats=1, max_repeats=1)
    assert (found.rate, found.fails_at, found.certain) == (2.0, None, False)


def test_both_ends_of_the_range_have_answers() -> None:
    assert search_rate(system(1.0)[0], share=0.9, low=8.0, high=64.0).rate is None
    found = search_rate(system(1000.0)[0], share=0.9, low=1.0, high=6.0)
    assert (found.rate, found.fails_at) == (6.0, None)
    assert [trial.rate for trial in found.trials] == [1.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"share": 0.0}, "the share must be above 0 and at most 1, not 0"),
        ({"low": 0.0}, "the lowest rate .0. must be above 0"),
        ({"low": 9.0, "high": 3.0}, "the lowest rate .9. must be above 0 and not above the highest .3."),
        ({"high": float("inf")}, r"the highest rate must be at most 1e\+09"),
        ({"tolerance": 0.0}, "the tolerance must be at least 1e-06"),
        ({"tolerance": 1e-17}, "the tolerance must be at least 1e-06"),
        ({"tolerance": float("nan")}, "the tolerance must be at least 1e-06"),
    ],
)
def test_bounds_that_make_no_sense(options: dict[str, float], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        search_rate(system(1.0)[0], **{"share": 0.9, "low": 1.0, "high": 4.0, **options})  # type: ignore[arg-type]


def test_the_share_counts_failed_requests() -> None:
    def sample(name: str, first_s: float, reason: str = "length") -> RequestSample:
        return RequestSample(request_id=name, arrival_s=0.0, sent_s=0.0, input_tokens=1, emissions=[(first_s, 1)],
                             finish_reason=reason)  # fmt: skip

    requests = [sample("a", 0.1), sample("b", 0.9), sample("c", 0.1, "error"), sample("d", 0.2)]
    assert goodput_share(Repeat(wall_s=1.0, requests=requests), {"ttft_s": 0.5}) == 0.5
    assert goodput_share(Repeat(wall_s=1.0, requests=[]), {"ttft_s": 0.5}) == 0.0
