from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import fmean, stdev

import pytest
from infermix.workload.arrivals import arrival_times
from infermix.workload.components import Constant, Gamma, Poisson


def gaps(arrivals, count: int = 20_000) -> list[float]:
    times = arrival_times(arrivals, count, Random(1))
    assert times[0] == 0.0
    assert len(times) == count
    return [later - earlier for earlier, later in pairwise(times)]


def test_nothing_said_means_all_at_once() -> None:
    assert arrival_times(None, 3, Random(1)) == [0.0, 0.0, 0.0]


def test_constant() -> None:
    assert arrival_times(Constant(request_rate=4.0), 4, Random(1)) == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (Poisson(request_rate=5.0), 1.0),
        (Gamma(request_rate=5.0, cv=0.5), 0.5),
        (Gamma(request_rate=5.0, cv=3.0), 3.0),
    ],
)
def test_rate_and_burstiness(arrivals, cv: float) -> None:
    drawn = gaps(arrivals)
    assert min(drawn) >= 0
    assert fmean(drawn) == pytest.approx(0.2, rel=4 * cv / len(drawn) ** 0.5)
    assert stdev(drawn) / fmean(drawn) == pytest.approx(cv, rel=0.1)


def test_gamma_of_one_is_poisson() -> None:
    """Exponential gaps: a share exp(-1) is longer than the mean."""
    for arrivals in (Poisson(request_rate=5.0), Gamma(request_rate=5.0, cv=1.0)):
        assert fmean(gap > 0.2 for gap in gaps(arrivals)) == pytest.approx(0.3679, abs=0.015)


def test_single_and_none() -> None:
    assert arrival_times(Poisson(request_rate=1.0), 1, Random(1)) == [0.0]
    assert arrival_times(Poisson(request_rate=1.0), 0, Random(1)) == []
