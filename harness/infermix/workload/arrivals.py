"""When requests arrive in an open loop."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from random import Random

from infermix.workload.components import Arrivals, Constant, Poisson


def arrival_times(arrivals: Arrivals | None, num_requests: int, random: Random) -> list[float]:
    """Seconds from the start of the repeat, not decreasing, the first at 0; all 0 without `arrivals`."""
    if arrivals is None:
        return [0.0] * num_requests
    if isinstance(arrivals, Constant):
        return [index / arrivals.request_rate for index in range(num_requests)]
    draw = _gap(arrivals, random)
    return list(accumulate((draw() for _ in range(num_requests - 1)), initial=0.0))[:num_requests]


def _gap(arrivals: Arrivals, random: Random) -> Callable[[], float]:
    if isinstance(arrivals, Poisson):
        return lambda: random.expovariate(arrivals.request_rate)
    assert not isinstance(arrivals, Constant)
    shape = 1 / arrivals.cv**2
    scale = 1 / (arrivals.request_rate * shape)
    return lambda: random.gammavariate(shape, scale)
