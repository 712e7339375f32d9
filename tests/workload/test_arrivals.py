from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import fmean, stdev
from typing import Any

import pytest
from infermix.errors import UserError
from infermix.workload.arrivals import arrival_times
from infermix.workload.assemble import PreparedWorkload
from infermix.workload.components import Constant, Gamma, OnOff, Poisson, Ramp, SyntheticOptions
from infermix.workload.synthetic import SyntheticSource


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


@pytest.mark.parametrize("arrivals", [
    Constant(request_rate=1e-320),
    Poisson(request_rate=1e-320),
    Gamma(request_rate=1e-320, cv=0.01),
    Gamma(request_rate=1e-320, cv=100.0),
    Ramp(start_rate=0.0, end_rate=1e-300, ramp_s=1e300),
    Ramp(start_rate=1e9, end_rate=1e-9, ramp_s=1e300),
])  # fmt: skip
def test_rates_that_nobody_can_wait_for_are_refused_or_drawn(arrivals: Any, make_context: Any) -> None:
    options = SyntheticOptions(num_requests=3, input_tokens=4, output_tokens=2, arrivals=arrivals)
    workload = PreparedWorkload(options, 0, SyntheticSource(options, make_context()))
    if isinstance(arrivals, Ramp) and arrivals.start_rate:
        assert workload.requests(0)[-1].arrival_s < 1e-6
    else:
        with pytest.raises(UserError, match="1e\\+09 s are the most"):
            workload.requests(0)


def test_bursts_alternate_between_two_rates() -> None:
    arrivals = OnOff(on_rate=20.0, off_rate=2.0, on_s=3.0, off_s=7.0)
    times = arrival_times(arrivals, 20_000, Random(1))
    assert times[0] == 0.0
    assert times == sorted(times)
    inside = sum(time % 10 < 3 for time in times)
    cycles = times[-1] / 10
    assert inside / cycles == pytest.approx(60, rel=0.03)
    assert (len(times) - inside) / cycles == pytest.approx(14, rel=0.05)


def test_no_request_arrives_between_bursts_of_rate_zero() -> None:
    arrivals = OnOff(on_rate=5.0, on_s=1.0, off_s=4.0)
    assert all(time % 5 <= 1 + 1e-9 for time in arrival_times(arrivals, 500, Random(2)))


def test_drawn_phases_keep_the_mean_rate() -> None:
    arrivals = OnOff(on_rate=10.0, on_s=1.0, off_s=1.0, exponential=True)
    times = arrival_times(arrivals, 20_000, Random(3))
    assert len(times) / times[-1] == pytest.approx(5, rel=0.05)
    drawn = [later - earlier for earlier, later in pairwise(times)]
    assert stdev(drawn) / fmean(drawn) > 1.5, "bursts have a larger spread than Poisson"


@pytest.mark.parametrize(("start", "end"), [(0.0, 40.0), (10.0, 30.0), (40.0, 4.0), (8.0, 8.0)])
def test_ramp_changes_the_rate_linearly(start: float, end: float) -> None:
    times = arrival_times(Ramp(start_rate=start, end_rate=end, ramp_s=100.0), 6_000, Random(1))
    assert times[0] == 0.0
    assert times == sorted(times)
    for low, high in ((0, 50), (50, 100), (100, 120)):
        middle = min((low + high) / 2, 100) if low < 100 else 100
        expected = (start + (end - start) * middle / 100) * (high - low)
        assert sum(low <= time < high for time in times) == pytest.approx(expected, abs=4 * expected**0.5 + 1)
