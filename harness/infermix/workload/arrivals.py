"""When requests arrive in an open loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from math import inf, sqrt
from random import Random

from infermix.workload.components import Arrivals, Constant, Gamma, OnOff, Poisson, Ramp


def arrival_times(arrivals: Arrivals | None, num_requests: int, random: Random) -> list[float]:
    """Seconds from the start of the repeat, not decreasing, the first at 0; all 0 without `arrivals`."""
    if arrivals is None:
        return [0.0] * num_requests
    if isinstance(arrivals, Constant):
        return [index / arrivals.request_rate for index in range(num_requests)]
    if isinstance(arrivals, OnOff):
        return list(islice(_bursts(arrivals, random), num_requests))
    if isinstance(arrivals, Ramp):
        return list(islice(_ramp(arrivals, random), num_requests))
    draw = _gap(arrivals, random)
    return list(accumulate((draw() for _ in range(num_requests - 1)), initial=0.0))[:num_requests]


def _gap(arrivals: Poisson | Gamma, random: Random) -> Callable[[], float]:
    if isinstance(arrivals, Poisson):
        return lambda: random.expovariate(arrivals.request_rate)
    spread = arrivals.cv**2
    return lambda: random.gammavariate(1 / spread, spread / arrivals.request_rate)


def _bursts(arrivals: OnOff, random: Random) -> Iterator[float]:
    """Each gap is a unit exponential of expected arrivals, spent phase by phase at the phase's rate."""
    yield 0.0
    now, phases = 0.0, _phases(arrivals, random)
    rate, left = next(phases)
    while True:
        work = random.expovariate(1.0)
        while work > rate * left:
            work -= rate * left
            now += left
            rate, left = next(phases)
        now += work / rate
        left -= work / rate
        yield now


def _phases(arrivals: OnOff, random: Random) -> Iterator[tuple[float, float]]:
    """Rate and length of each phase."""
    while True:
        for rate, mean_s in ((arrivals.on_rate, arrivals.on_s), (arrivals.off_rate, arrivals.off_s)):
            yield rate, random.expovariate(1 / mean_s) if arrivals.exponential else mean_s


def _ramp(arrivals: Ramp, random: Random) -> Iterator[float]:
    """Inverts the expected arrivals until t: start t + (end - start) t^2 / (2 ramp_s), then linear."""
    start, end, ramp_s = arrivals.start_rate, arrivals.end_rate, arrivals.ramp_s
    slope, in_ramp = (end - start) / ramp_s, (start + end) / 2 * ramp_s
    expected = 0.0
    while True:
        if expected >= in_ramp:
            yield ramp_s + (expected - in_ramp) / end
        elif expected == 0:
            yield 0.0
        else:
            rates = start + sqrt(max(0.0, start**2 + 2 * slope * expected))
            yield 2 * expected / rates if rates else inf
        expected += random.expovariate(1.0)
