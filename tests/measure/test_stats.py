from __future__ import annotations

import math
from random import Random

import pytest
from infermix.measure.stats import (
    Drift,
    abba,
    drift,
    is_steady,
    mean_interval,
    minimum_detectable_effect,
    paired_ratio,
    positive_interval,
    t_cdf,
    t_quantile,
    unpaired_ratio,
    wilson_interval,
)


def line(samples: list[float]) -> Drift:
    found = drift(samples)
    assert found is not None
    return found


# Values of the usual printed tables of Student's t.
@pytest.mark.parametrize(
    ("p", "df", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 4, 2.77645),
        (0.975, 9, 2.26216),
        (0.975, 30, 2.04227),
        (0.975, 1000, 1.96234),
        (0.95, 5, 2.01505),
        (0.995, 3, 5.84091),
        (0.80, 4, 0.94096),
        (0.9995, 1, 636.619),
    ],
)
def test_t_quantile_of_the_tables(p: float, df: float, expected: float) -> None:
    assert t_quantile(p, df) == pytest.approx(expected, rel=2e-6, abs=5e-6)
    assert t_quantile(1 - p, df) == pytest.approx(-expected, rel=2e-6, abs=5e-6)


def test_t_quantile_of_the_closed_forms() -> None:
    for p in (0.6, 0.9, 0.999):
        assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)
        two = (2 * p - 1) / math.sqrt(2 * p * (1 - p))
        assert t_quantile(p, 2) == pytest.approx(two, rel=1e-9)


@pytest.mark.parametrize("df", [1, 2.5, 7, 200])
def test_t_cdf_inverts_the_quantile(df: float) -> None:
    assert t_cdf(0.0, df) == pytest.approx(0.5)
    for p in (0.01, 0.3, 0.5, 0.77, 0.999):
        assert t_cdf(t_quantile(p, df), df) == pytest.approx(p, abs=1e-10)


def test_mean_interval_by_hand() -> None:
    interval = mean_interval([10.0, 12.0, 14.0])
    half = 4.302653 * 2 / math.sqrt(3)
    assert interval.value == 12.0
    assert (interval.low, interval.high) == (pytest.approx(12 - half, rel=1e-6), pytest.approx(12 + half, rel=1e-6))
    assert (mean_interval([3.0]).low, mean_interval([3.0]).high) == (None, None)
    assert mean_interval([3.0, 3.0]).low == 3.0


@pytest.mark.parametrize("repeats", [3, 5])
def test_mean_interval_covers_as_often_as_it_says(repeats: int) -> None:
    random, covered, trials = Random(1), 0, 4000
    for _ in range(trials):
        interval = mean_interval([random.gauss(100, 7) for _ in range(repeats)])
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= 100 <= interval.high
    assert covered / trials == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors


def test_positive_interval_by_hand() -> None:
    interval = positive_interval([1.0, 2.0, 4.0])
    factor = math.exp(4.302653 * math.log(2) / math.sqrt(3))
    assert interval.value == pytest.approx(2.0)
    assert (interval.low, interval.high) == (pytest.approx(2 / factor, rel=1e-6), pytest.approx(2 * factor, rel=1e-6))
    single, equal = positive_interval([0.1]), positive_interval([0.1, 0.1, 0.1])
    assert (single.value, single.low, single.high) == (0.1, None, None)
    assert (equal.value, equal.low, equal.high) == (0.1, 0.1, 0.1)


def test_positive_interval_is_never_negative() -> None:
    two = positive_interval([1134.0, 1672.0])
    assert two.low is not None
    assert 0 < two.low < two.value
    with_zero = positive_interval([0.0, 0.5])
    assert (with_zero.value, with_zero.low) == (0.25, 0.0)
    assert with_zero.high == mean_interval([0.0, 0.5]).high
    assert positive_interval([0.0]).low is None


@pytest.mark.parametrize(("repeats", "spread"), [(2, 0.3), (3, 0.07), (5, 0.5)])
def test_positive_interval_covers_as_often_as_it_says(repeats: int, spread: float) -> None:
    random, covered, trials = Random(6), 0, 4000
    for _ in range(trials):
        interval = positive_interval([100 * random.lognormvariate(0, spread) for _ in range(repeats)])
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= 100 <= interval.high
    assert covered / trials == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors


def test_positive_interval_also_covers_the_mean_of_a_symmetric_rate() -> None:
    random, covered, trials = Random(7), 0, 4000
    for _ in range(trials):
        interval = positive_interval([random.gauss(100, 7) for _ in range(3)])
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= 100 <= interval.high
    assert covered / trials == pytest.approx(0.95, abs=0.015)


def test_paired_ratio_by_hand() -> None:
    ratio = paired_ratio([2.0, 8.0], [1.0, 2.0])
    # logs: ln 2 and ln 4; mean 1.5 ln 2, s = ln 2 / sqrt 2, half = t(.975, 1) s / sqrt 2
    half = 12.7062047 * math.log(2) / 2
    assert ratio.ratio == pytest.approx(2**1.5)
    assert ratio.low == pytest.approx(math.exp(1.5 * math.log(2) - half), rel=1e-6)
    assert not ratio.significant


def test_pairing_removes_what_both_share() -> None:
    random = Random(2)
    weather = [random.lognormvariate(0, 0.3) for _ in range(8)]
    a = [1.05 * w * random.lognormvariate(0, 0.005) for w in weather]
    b = [w * random.lognormvariate(0, 0.005) for w in weather]
    assert paired_ratio(a, b).significant
    assert not unpaired_ratio(a, b).significant


def test_abba_cancels_a_linear_drift() -> None:
    assert abba(4) == ["A", "B", "B", "A", "A", "B", "B", "A"]
    times: dict[str, list[float]] = {"A": [], "B": []}
    for index, label in enumerate(abba(8)):
        times[label].append(math.exp(0.01 * index) * {"A": 1.2, "B": 1.0}[label])
    assert paired_ratio(times["A"], times["B"]).ratio == pytest.approx(1.2, rel=1e-12)


def test_paired_ratio_covers_and_its_null_is_rarely_significant() -> None:
    random, hits, trials = Random(3), 0, 3000
    for _ in range(trials):
        a, b = ([random.lognormvariate(0, 0.05) for _ in range(6)] for _ in range(2))
        hits += paired_ratio(a, b).significant
    assert hits / trials == pytest.approx(0.05, abs=0.014)


def test_the_detectable_effect_is_detected_with_the_stated_power() -> None:
    random, seen, trials, spread, pairs = Random(4), 0, 3000, 0.03, 6
    effect = minimum_detectable_effect(spread / math.sqrt(pairs), pairs - 1)
    for _ in range(trials):
        ratios = [(1 + effect) * random.lognormvariate(0, spread) for _ in range(pairs)]
        seen += paired_ratio(ratios, [1.0] * pairs).significant
    assert seen / trials == pytest.approx(0.80, abs=0.04)


def test_ratios_without_an_interval() -> None:
    for ratio in (paired_ratio([3.0], [2.0]), unpaired_ratio([3.0, 3.0], [2.0])):
        assert ratio.ratio == pytest.approx(1.5)
        assert (ratio.low, ratio.high, ratio.detectable, ratio.significant) == (None, None, None, False)


def test_welch_against_a_worked_example() -> None:
    """Equal sizes and equal variances make Welch's degrees of freedom 2 n - 2."""
    a, b = [math.e**x for x in (1.0, 2.0, 3.0)], [math.e**x for x in (0.0, 1.0, 2.0)]
    ratio = unpaired_ratio(a, b)
    half = 2.776445 * math.sqrt(2 / 3)
    assert ratio.ratio == pytest.approx(math.e)
    assert ratio.high == pytest.approx(math.exp(1 + half), rel=1e-6)
    assert unpaired_ratio([2.0, 2.0], [1.0, 1.0]).significant


@pytest.mark.parametrize(
    ("rates", "steady"),
    [
        ([], False),
        ([100], False),
        ([100, 102], True),
        ([100, 110], False),
        ([50, 100, 101], False),  # still climbing
        ([150, 100, 101], True),
        ([100, 104, 108], False),  # small steps in one direction
        ([100, 101, 102], True),
        ([10, 50, 100, 101, 100], True),
        ([110, 105, 100], False),
        ([0, 0], False),
    ],
)
def test_steady(rates: list[float], steady: bool) -> None:
    assert is_steady(rates) is steady


def test_drift_by_hand() -> None:
    """Slope 1 over 0..3, residuals +-0.2: the p-value is that of the t with 2 degrees of freedom."""
    found = line([10.2, 10.8, 11.8, 13.2])
    assert found.change == pytest.approx(3 / 11.5)
    residual = sum(e**2 for e in (0.2, -0.2, -0.2, 0.2))
    t = 1 / math.sqrt(residual / 2 / 5)
    assert found.p_value == pytest.approx(2 * (1 - t_cdf(t, 2)))


def test_drift_needs_three_repeats_and_finds_none_in_noise() -> None:
    assert drift([1.0, 2.0]) is None
    assert drift([0.0, 0.0, 0.0]) is None
    assert line([5.0, 5.0, 5.0]).p_value == 1.0
    assert line([5.0, 6.0, 7.0]).p_value == 0.0
    random, alarms = Random(5), 0
    for _ in range(2000):
        alarms += line([random.gauss(10, 1) for _ in range(5)]).p_value < 0.05
    assert alarms / 2000 == pytest.approx(0.05, abs=0.017)


def test_wilson() -> None:
    # 8 of 10: the textbook interval is 0.490 to 0.943
    interval = wilson_interval(8, 10)
    assert (interval.low, interval.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson_interval(0, 20).low == pytest.approx(0.0, abs=1e-12)
    assert wilson_interval(0, 20).high == pytest.approx(0.1611, abs=1e-4)
