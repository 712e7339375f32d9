"""Differences between two records or two groups of records, with their noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from infermix.errors import UserError, nearest
from infermix.measure.stats import mean_interval, paired_ratio, positive_interval, unpaired_ratio
from infermix.record.record import Metric, Summary

Better = Literal["higher", "lower", "none"]
Method = Literal["paired repeats", "repeats", "runs", "paired samples", "single values"]

DEFAULT_METRICS = (
    "output_tokens_per_s",
    "requests_per_s",
    "goodput_rps",
    "ttft_s_p50",
    "ttft_s_p99",
    "tpot_s_p50",
    "tpot_s_p99",
    "e2e_s_p99",
    "peak_bytes",
    "weight_bytes",
    "kv_bytes_per_token",
)
LOWER_IS_BETTER = "_bytes", "bytes_per_token"


@dataclass(frozen=True)
class Difference:
    """One metric, B against A. `relative` is B / A - 1, with its 95 % interval and the smallest change that
    could have been seen with a probability of 80 %; these are `None` for single values, of which nothing is
    claimed.
    """

    metric: str
    unit: str
    better: Better
    a: float
    b: float
    relative: float
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    method: Method = "single values"
    samples: tuple[int, int] = (1, 1)

    @property
    def has_interval(self) -> bool:
        return self.low is not None and self.high is not None

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def outcome(self) -> str:
        """`better`, `worse`, `different`, `no significant difference`, `equal`, or `no interval`."""
        if not self.has_interval:
            return "equal" if self.a == self.b else "no interval"
        if not self.significant:
            return "equal" if self.a == self.b else "no significant difference"
        if self.better == "none":
            return "different"
        return "better" if (self.relative > 0) == (self.better == "higher") else "worse"


@dataclass(frozen=True)
class _Values:
    """What one side knows of a metric: a figure, and independent samples of it with what they are."""

    value: float
    unit: str
    better: Better
    samples: Sequence[float] = ()


def compare(a: Sequence[Summary], b: Sequence[Summary], metrics: Iterable[str] = ()) -> list[Difference]:
    """Differences of one cell: `a` and `b` are its runs on either side, all of them `ok`.

    Several runs on both sides are compared by run; otherwise repeats are, in pairs when B was interleaved
    with A. Without `metrics`: the usual ones and every quality metric that both sides have. Raises
    `UserError` for a metric that neither side has.
    """
    names = list(metrics)
    for name in names:
        _check_known(name, [*a, *b])
    return [
        difference
        for name in names or [*DEFAULT_METRICS, *sorted(quality_names(a) & quality_names(b))]
        if (difference := _difference(name, a, b)) is not None
    ]


def known_metrics(records: Iterable[Summary]) -> set[str]:
    """Every metric, memory figure and quality metric of `records`."""
    return {name for record in records for name in (*record.metrics, *record.memory, *record.quality)}


def quality_names(records: Iterable[Summary]) -> set[str]:
    return {name for record in records for name in record.quality}


def _check_known(name: str, records: Sequence[Summary]) -> None:
    known = known_metrics(records)
    if name not in known:
        raise UserError(f"no record has the metric {name!r}", hint=nearest(name, known))


def _difference(name: str, a: Sequence[Summary], b: Sequence[Summary]) -> Difference | None:
    ours, theirs = [_values(record, name) for record in b], [_values(record, name) for record in a]
    if any(values is None for values in [*ours, *theirs]):
        return None
    left = [values for values in theirs if values is not None]
    right = [values for values in ours if values is not None]
    if len(a) > 1 and len(b) > 1:
        return _from_samples(name, [v.value for v in left], [v.value for v in right], left[0], "runs")
    if len(a) == len(b) == 1:
        if name in b[0].quality and name not in b[0].metrics:
            return _quality_difference(name, left[0], right[0])
        turns = _turns(name, a[0], b[0])
        if turns is not None:
            return _from_samples(name, *turns, left[0], "paired repeats")
    return _from_samples(name, _pooled(left), _pooled(right), left[0], "repeats")


def _values(record: Summary, name: str) -> _Values | None:
    if name in record.metrics:
        metric: Metric = record.metrics[name]
        return _Values(metric.value, metric.unit, metric.better, metric.samples)
    if name in record.memory:
        return _Values(record.memory[name], "bytes", "lower" if name.endswith(LOWER_IS_BETTER) else "none")
    if name in record.quality:
        quality = record.quality[name]
        return _Values(quality.value, quality.unit, quality.better, quality.samples)
    return None


def _pooled(values: Sequence[_Values]) -> list[float]:
    """Repeats of one run; of several runs, whose repeats are not independent, one value each."""
    if len(values) == 1:
        return list(values[0].samples) or [values[0].value]
    return [each.value for each in values]


def _turns(name: str, a: Summary, b: Summary) -> tuple[Sequence[float], Sequence[float]] | None:
    """The repeats of A and B that took turns; `None` when the two runs were not interleaved."""
    for one, other in ((b, a), (a, b)):
        paired = one.paired
        samples = paired.get("baseline_samples", {}).get(name)
        if paired.get("mode") != "alternating" or paired.get("baseline") != other.run_id or not samples:
            continue
        own = one.metrics[name].samples if name in one.metrics else []
        if len(own) == len(samples):
            return (samples, own) if one is b else (own, samples)
    return None


def _from_samples(name: str, a: Sequence[float], b: Sequence[float], like: _Values, method: Method) -> Difference:
    mean_a, mean_b = positive_interval(a).value, positive_interval(b).value
    found = Difference(
        metric=name,
        unit=like.unit,
        better=like.better,
        a=mean_a,
        b=mean_b,
        relative=_relative(mean_a, mean_b),
        samples=(len(a), len(b)),
    )
    if min(len(a), len(b)) < 2 or min(*a, *b) <= 0:
        return found
    ratio = paired_ratio(b, a) if method == "paired repeats" else unpaired_ratio(b, a)
    if ratio.low is None or ratio.high is None:
        return found
    return replace(
        found,
        relative=ratio.ratio - 1,
        low=ratio.low - 1,
        high=ratio.high - 1,
        detectable=ratio.detectable,
        method=method,
    )


def _relative(a: float, b: float) -> float:
    """B / A - 1; infinite where A is zero and B is not."""
    if a == 0:
        return 0.0 if b == 0 else math.copysign(math.inf, b)
    return b / a - 1


def _quality_difference(name: str, a: _Values, b: _Values) -> Difference:
    """Quality of two cells on the same items: the width of the interval is that of their samples' paired
    difference.

    A perplexity's samples are mean negative log-likelihoods per window, so their difference is a log ratio
    already; for other metrics the samples are in the unit of the value.
    """
    found = Difference(
        metric=name, unit=a.unit, better=a.better, a=a.value, b=b.value, relative=_relative(a.value, b.value)
    )
    if len(a.samples) != len(b.samples) or len(a.samples) < 2 or not a.value or not b.value:
        return found
    interval = mean_interval([y - x for x, y in zip(a.samples, b.samples, strict=True)])
    assert interval.low is not None
    half, ratio, count = interval.value - interval.low, b.value / a.value, (len(a.samples), len(b.samples))
    if name.startswith("perplexity"):
        low, high = ratio * math.exp(-half) - 1, ratio * math.exp(half) - 1
    else:
        low, high = ratio - 1 - half / abs(a.value), ratio - 1 + half / abs(a.value)
    return replace(found, low=low, high=high, method="paired samples", samples=count)
