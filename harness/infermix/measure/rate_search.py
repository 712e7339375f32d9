"""The largest request rate that a system sustains: bisection with confidence over repeats. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

from infermix.errors import UserError
from infermix.measure.goodput import meets_limits
from infermix.measure.stats import Interval, mean_interval
from infermix.record.record import Repeat

#: Runs a rate (requests/s) so many times with independent draws; returns the goodput share of each repeat.
Probe = Callable[[float, int], Sequence[float]]

#: Below, the two rates would come so close that no number lies between them, and the search never end.
LEAST_TOLERANCE = 1e-6
#: Requests per second of which any engine falls short: a search must end.
MOST_RATE = 1e9


@dataclass(frozen=True)
class Trial:
    """One rate. `certain`: the interval over repeats lies on one side of the wanted share."""

    rate: float
    share: Interval
    holds: bool
    certain: bool


@dataclass(frozen=True)
class RateSearch:
    """`rate`: the largest that held, `None` when not even the lowest did. `fails_at`: the smallest above it that did
    not, `None` when the highest allowed one held. `trials` in the order in which they ran."""

    rate: float | None
    fails_at: float | None
    trials: list[Trial] = field(default_factory=list)

    @property
    def ends(self) -> list[Trial]:
        """The trials at the ends of the bracket."""
        return [trial for trial in self.trials if trial.rate in (self.rate, self.fails_at)]

    @property
    def certain(self) -> bool:
        """Whether both ends of the bracket are certain."""
        return all(trial.certain for trial in self.ends)


def goodput_share(repeat: Repeat, limits: Mapping[str, float]) -> float:
    """Share of a repeat's requests, failed ones included, that met the limits."""
    if not repeat.requests:
        return 0.0
    return sum(meets_limits(sample, limits) for sample in repeat.requests) / len(repeat.requests)


def search_rate(
    probe: Probe,
    *,
    share: float,
    low: float,
    high: float,
    tolerance: float = 0.05,
    repeats: int = 3,
    max_repeats: int = 12,
) -> RateSearch:
    """Double from `low` until a rate fails or `high` holds, then bisect the logarithm down to `tolerance`.

    A rate holds when the mean share over repeats is at least `share`; while the 95 % t-interval contains `share`, the
    rate runs again with twice the repeats, up to `max_repeats`. What is still open then counts by its mean, and the
    trial says so. Assumes that more load never helps. Raises `UserError` for bounds that make no sense.
    """
    _check(share, low, high, tolerance, repeats)
    trials: list[Trial] = []

    def holds(rate: float) -> bool:
        trials.append(_try(probe, rate, share, repeats, max_repeats))
        return trials[-1].holds

    good, bad = None, None
    rate = low
    while bad is None:
        if holds(rate):
            good = rate
            if rate >= high:
                return RateSearch(good, None, trials)
            rate = min(2 * rate, high)
        else:
            bad = rate
    while good is not None and bad / good > 1 + tolerance:
        middle = sqrt(good * bad)
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return RateSearch(good, bad, trials)


def _try(probe: Probe, rate: float, share: float, repeats: int, max_repeats: int) -> Trial:
    while True:
        interval = mean_interval(list(probe(rate, repeats)))
        certain = _is_certain(interval, share)
        if certain or repeats >= max_repeats:
            return Trial(rate, interval, interval.value >= share, certain)
        repeats = min(2 * repeats, max_repeats)


def _is_certain(interval: Interval, share: float) -> bool:
    """One repeat says nothing about the next one."""
    if interval.low is None or interval.high is None:
        return False
    return interval.low >= share or interval.high < share


def _check(share: float, low: float, high: float, tolerance: float, repeats: int) -> None:
    if not 0 < share <= 1:
        raise UserError(f"the share must be above 0 and at most 1, not {share:g}")
    if not 0 < low <= high:
        raise UserError(f"the lowest rate ({low:g}) must be above 0 and not above the highest ({high:g})")
    if not high <= MOST_RATE:
        raise UserError(f"the highest rate must be at most {MOST_RATE:g} requests/s, not {high:g}")
    if not tolerance >= LEAST_TOLERANCE:
        raise UserError(f"the tolerance must be at least {LEAST_TOLERANCE:g}, not {tolerance:g}")
    if repeats < 1:
        raise UserError(f"at least one repeat is needed, not {repeats}")
