"""Figures with intervals, ratios to a baseline, and ranks that claim no more than the intervals allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from infermix.measure.stats import LEVEL, positive_interval, t_quantile
from infermix.record.record import Metric, Summary


@dataclass(frozen=True, slots=True)
class Figure:
    """A number in base units with its 95 % interval over repeats, where there is one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def has_interval(self) -> bool:
        return self.low is not None and self.high is not None

    def overlaps(self, other: Figure) -> bool:
        """Whether both have intervals and these share a point."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True)
class Rank:
    """`number` counts from 1. `mark`: `=` shares its rank with other rows, `?` has no interval to tell it
    apart.
    """

    number: int
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.number} {self.mark}".strip()


def figure(metric: Metric | None) -> Figure | None:
    """`None` when the metric is missing or not finite.

    Taken from the samples where the record has them, so that rows of records from different versions compare.
    """
    if metric is None or not math.isfinite(metric.value):
        return None
    if not metric.samples:
        return Figure(metric.value, metric.ci_low, metric.ci_high)
    found = positive_interval(metric.samples)
    return Figure(found.value, found.low, found.high)


def ranks(figures: Sequence[Figure]) -> list[Rank]:
    """Ranks of figures that are sorted best first.

    A rank is led by its best row; every following row whose interval overlaps the leader's shares the rank,
    since no significant difference was shown. The first one that does not overlap leads the next rank. A
    row without an interval (one repeat) is never grouped and carries `?`.
    """
    leaders: list[int] = []
    for index, current in enumerate(figures):
        leader = leaders[-1] if leaders else None
        shares = leader is not None and current.overlaps(figures[leader])
        leaders.append(leader if shares and leader is not None else index)
    return [Rank(leader + 1, _mark(index, leaders, figures)) for index, leader in enumerate(leaders)]


def ratio(metric: Metric | None, baseline: Metric | None) -> Figure | None:
    """`metric / baseline`; the interval is Welch's on logarithms and needs two repeats on both sides."""
    ours, theirs = figure(metric), figure(baseline)
    if metric is None or baseline is None or ours is None or theirs is None or not theirs.value:
        return None
    value = ours.value / theirs.value
    half = _half_width(metric.samples, baseline.samples)
    if half is None or value <= 0:
        return Figure(value)
    return Figure(value, value / math.exp(half), value * math.exp(half))


def paired_ratio(record: Summary, baseline: Summary, name: str) -> Figure | None:
    """The ratio measured by taking turns with this very run of the baseline; `None` when they did not."""
    found = record.paired.get("ratios", {}).get(name)
    if found is None or record.paired.get("baseline") != baseline.run_id:
        return None
    return Figure(found["ratio"], found.get("low"), found.get("high"))


def _half_width(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Half of Welch's interval of mean(log a) - mean(log b); `None` without two positive samples on both
    sides.
    """
    if min(len(a), len(b)) < 2 or min(*a, *b) <= 0:
        return None
    errors = [_squared_error([math.log(x) for x in samples]) for samples in (a, b)]
    error = sum(errors)
    if error == 0:
        return 0.0
    df = error**2 / (errors[0] ** 2 / (len(a) - 1) + errors[1] ** 2 / (len(b) - 1))
    return _quantile(max(1, math.floor(df * 10))) * math.sqrt(error)


def _squared_error(values: Sequence[float]) -> float:
    """Squared standard error of the mean (`statistics.variance` is exact and twenty times slower)."""
    n = len(values)
    mean = math.fsum(values) / n
    return math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n


@lru_cache(maxsize=4096)
def _quantile(tenths: int) -> float:
    """Student's t for degrees of freedom in tenths, rounded down so that few distinct values serve many
    rows.
    """
    return t_quantile((1 + LEVEL) / 2, tenths / 10)


def _mark(index: int, leaders: Sequence[int], figures: Sequence[Figure]) -> str:
    if not figures[index].has_interval:
        return "?"
    leader = leaders[index]
    followed = leader + 1 < len(leaders) and leaders[leader + 1] == leader
    return "=" if leader != index or followed else ""
