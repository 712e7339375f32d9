"""Statistics of few repeats: intervals, paired ratios, steadiness, drift. Pure Python, no clock, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

LEVEL = 0.95
POWER = 0.80


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval; the bounds are `None` where one sample gives none."""

    value: float
    low: float | None
    high: float | None
    samples: int


@dataclass(frozen=True)
class Ratio:
    """`a / b` with its interval; `detectable` is the smallest relative change that could have been seen.

    `significant` says whether the interval excludes 1. All but `ratio` are `None` (and `False`) when the samples do
    not allow an interval.
    """

    ratio: float
    low: float | None
    high: float | None
    detectable: float | None
    pairs: int

    @property
    def significant(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


@dataclass(frozen=True)
class Drift:
    """A straight line through the repeats: `change` from first to last relative to the mean, two-sided `p_value`."""

    change: float
    p_value: float


def t_cdf(t: float, df: float) -> float:
    """P(T <= t) of Student's t with `df` degrees of freedom."""
    tail = 0.5 * _incomplete_beta(df / (df + t * t), df / 2, 0.5)
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=1024)
def t_quantile(p: float, df: float) -> float:
    """The `t` with `t_cdf(t, df) == p`, to 1e-12 relative."""
    assert 0 < p < 1
    assert df > 0
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        low, high = high, high * 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1 - front * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of I_x(a, b) by Lentz's method (Abramowitz and Stegun 26.5.8)."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / _away_from_zero(1 - (a + b) * x / (a + 1), tiny)
    result = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d, tiny)
            c = _away_from_zero(1 + term / c, tiny)
            result *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return result


def _away_from_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


def mean_interval(samples: Sequence[float], level: float = LEVEL) -> Interval:
    """Mean and t-interval of independent samples (one per repeat)."""
    mean, n = fmean(samples), len(samples)
    if n < 2:
        return Interval(mean, None, None, n)
    half = t_quantile((1 + level) / 2, n - 1) * stdev(samples) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def positive_interval(samples: Sequence[float], level: float = LEVEL) -> Interval:
    """Geometric mean and t-interval on the logarithms, for rates and times (one sample per repeat, none negative).

    What disturbs a rate or a time multiplies it, and ratios are compared on logarithms, too; the interval stays
    positive however few repeats there are. Where a sample is 0 (a share of failures): the arithmetic mean and its
    t-interval, which begins at 0 at the lowest.
    """
    if min(samples) <= 0:
        plain = mean_interval(samples, level)
        return plain if plain.low is None else Interval(plain.value, max(0.0, plain.low), plain.high, plain.samples)
    n, first = len(samples), samples[0]
    # Relative to the first sample, so that a single one, or equal ones, come back exactly as they are.
    logs = [math.log(sample / first) for sample in samples]
    mean = math.fsum(logs) / n
    value = first * math.exp(mean)
    if n < 2:
        return Interval(value, None, None, n)
    # `statistics.stdev` is exact and twenty times slower; a leaderboard asks for tens of thousands of intervals.
    error = math.sqrt(math.fsum((each - mean) ** 2 for each in logs) / (n - 1) / n)
    factor = math.exp(t_quantile((1 + level) / 2, n - 1) * error)
    return Interval(value, value / factor, value * factor, n)


def abba(pairs: int) -> list[str]:
    """The order of `pairs` interleaved pairs: A B, B A, A B, ... so that a linear drift cancels."""
    return [label for index in range(pairs) for label in ("AB" if index % 2 == 0 else "BA")]


def paired_ratio(a: Sequence[float], b: Sequence[float], level: float = LEVEL) -> Ratio:
    """Geometric mean of `a[i] / b[i]` with a t-interval on the logarithms. All values must be positive."""
    assert len(a) == len(b)
    assert len(a) > 0
    logs = [math.log(x) - math.log(y) for x, y in zip(a, b, strict=True)]
    interval = mean_interval(logs, level)
    if interval.low is None or interval.high is None:
        return Ratio(math.exp(interval.value), None, None, None, len(logs))
    detectable = minimum_detectable_effect(stdev(logs) / math.sqrt(len(logs)), len(logs) - 1, level)
    return Ratio(math.exp(interval.value), math.exp(interval.low), math.exp(interval.high), detectable, len(logs))


def unpaired_ratio(a: Sequence[float], b: Sequence[float], level: float = LEVEL) -> Ratio:
    """Ratio of geometric means of two independent sets of repeats (Welch's interval on the logarithms)."""
    log_a, log_b = [math.log(x) for x in a], [math.log(x) for x in b]
    difference, pairs = fmean(log_a) - fmean(log_b), min(len(a), len(b))
    if pairs < 2:
        return Ratio(math.exp(difference), None, None, None, pairs)
    error_a, error_b = stdev(log_a) ** 2 / len(a), stdev(log_b) ** 2 / len(b)
    error = math.sqrt(error_a + error_b)
    if error == 0:
        return Ratio(math.exp(difference), math.exp(difference), math.exp(difference), 0.0, pairs)
    df = error**4 / (error_a**2 / (len(a) - 1) + error_b**2 / (len(b) - 1))
    half = t_quantile((1 + level) / 2, df) * error
    detectable = minimum_detectable_effect(error, df, level)
    return Ratio(math.exp(difference), math.exp(difference - half), math.exp(difference + half), detectable, pairs)


def minimum_detectable_effect(standard_error: float, df: float, level: float = LEVEL, power: float = POWER) -> float:
    """Smallest relative change seen with probability `power`, given the standard error of the log ratio."""
    return math.expm1((t_quantile((1 + level) / 2, df) + t_quantile(power, df)) * standard_error)


def is_steady(rates: Sequence[float], tolerance: float = 0.05) -> bool:
    """Whether warm-up has ended: the last two rates agree within `tolerance`, the last three show no trend."""
    if len(rates) < 2 or min(rates[-2:]) <= 0:
        return False
    last, before = rates[-1], rates[-2]
    if abs(last / before - 1) > tolerance:
        return False
    return len(rates) == 2 or not _trend(rates[-3:], tolerance)


def _trend(rates: Sequence[float], tolerance: float) -> bool:
    monotone = rates[0] < rates[1] < rates[2] or rates[0] > rates[1] > rates[2]
    return monotone and abs(rates[2] / rates[0] - 1) > tolerance


def drift(samples: Sequence[float]) -> Drift | None:
    """Least-squares slope over the repeats' order; `None` below three samples or around a mean of zero."""
    n = len(samples)
    mean = fmean(samples) if samples else 0.0
    if n < 3 or mean == 0:
        return None
    centre = (n - 1) / 2
    spread = sum((i - centre) ** 2 for i in range(n))
    slope = sum((i - centre) * (y - mean) for i, y in enumerate(samples)) / spread
    residual = sum((y - mean - slope * (i - centre)) ** 2 for i, y in enumerate(samples))
    change = slope * (n - 1) / mean
    if slope == 0:
        return Drift(0.0, 1.0)
    error = math.sqrt(residual / (n - 2) / spread)
    if error <= 1e-12 * abs(slope):
        return Drift(change, 0.0)
    return Drift(change, 2 * (1 - t_cdf(abs(slope) / error, n - 2)))


def wilson_interval(successes: int, total: int, level: float = LEVEL) -> Interval:
    """Wilson's score interval of a share."""
    assert 0 <= successes <= total
    assert total > 0
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = successes / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / scale
    return Interval(share, centre - half, centre + half, total)
