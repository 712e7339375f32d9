"""From raw samples to metrics. One value per repeat; intervals are over repeats, never over correlated requests.

Value and interval of rates and times are geometric (`stats.positive_interval`), as the ratios between rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from infermix.errors import UserError
from infermix.measure import goodput as per_request
from infermix.measure.denoising import DENOISING_METRICS, denoising
from infermix.measure.foresight import FORESIGHT_METRICS, foresight
from infermix.measure.goodput import check_goodput, meets_limits, output_tokens
from infermix.measure.groups import group_figures
from infermix.measure.kv_figures import KV_FIGURES, Better, kv_figures
from infermix.measure.speculation import speculation, speculation_metric
from infermix.measure.stats import positive_interval
from infermix.record.gaps import GapHistogram
from infermix.record.record import Metric, Repeat, RequestSample

PERCENTILES = (50, 90, 99)

_LATENCIES: Mapping[str, Callable[[RequestSample], float | None]] = {
    "ttft_s": per_request.ttft_s,
    "ttft_from_send_s": per_request.ttft_from_send_s,
    "tpot_s": per_request.tpot_s,
    "e2e_s": per_request.e2e_s,
}

#: Unit and direction of every metric that is not a latency.
_RATES: Mapping[str, tuple[str, Better]] = {
    "output_tokens_per_s": ("tokens/s", "higher"),
    "input_tokens_per_s": ("tokens/s", "higher"),
    "total_tokens_per_s": ("tokens/s", "higher"),
    "requests_per_s": ("requests/s", "higher"),
    "goodput_rps": ("requests/s", "higher"),
    "tokens_per_emission": ("tokens", "none"),
    "failed_share": ("", "lower"),
    "requests": ("requests", "none"),
    **KV_FIGURES,
    **DENOISING_METRICS,
    **FORESIGHT_METRICS,
}


def summarise(repeats: Sequence[Repeat], goodput: Mapping[str, float] | None = None) -> dict[str, Metric]:
    """All metrics of the measured repeats; `goodput_rps` only when limits are stated.

    Latencies have the suffixes `_mean`, `_p50`, `_p90`, `_p99` (numpy's linear percentiles over the requests, for ITL
    over the gaps, of one repeat) and leave failed requests out. A metric that no request defines is absent. Decoders
    that draft add the figures of `measure.speculation`, those that fill in masks of `measure.denoising`, schedulers
    that predict lengths that of `measure.foresight`. Where requests have categories or tenants, `NAME[GROUP]` are
    latencies of one of them (`measure.groups`). Raises `UserError` for an unknown goodput limit.
    """
    limits = goodput or {}
    check_goodput(limits)
    values: dict[str, list[float]] = {}
    for repeat in repeats:
        for name, value in (repeat.figures or repeat_figures(repeat, limits)).items():
            values.setdefault(name, []).append(value)
    return {name: _metric(name, samples) for name, samples in values.items()}


def repeat_figures(repeat: Repeat, limits: Mapping[str, float]) -> dict[str, float]:
    """Every figure of one repeat. Raises `UserError` for a limit that its samples cannot be held to."""
    if repeat.gaps is not None and "itl_s" in limits:
        raise UserError(
            "this run keeps no times between the tokens of a request, so none can be held to a limit on them",
            key="measure.goodput.itl_s",
            hint="engine.detail: tokens keeps them",
        )
    counters = repeat.environment.get("counters", {})
    parts = {**speculation(counters, repeat.wall_s), **denoising(counters), **foresight(counters)}
    return {**rates(repeat, limits), **latencies(repeat), **kv_figures(repeat), **parts}


def _metric(name: str, samples: list[float]) -> Metric:
    unit, better = _RATES.get(name) or speculation_metric(name) or ("s", "lower")
    interval = positive_interval(samples)
    return Metric(
        value=interval.value,
        unit=unit,
        better=better,
        samples=samples,
        ci_low=interval.low,
        ci_high=interval.high,
    )


def rates(repeat: Repeat, limits: Mapping[str, float]) -> dict[str, float]:
    """Throughput, goodput and shares of one repeat. Failed requests count in `failed_share` alone."""
    done = [sample for sample in repeat.requests if not per_request.failed(sample)]
    wall_s = repeat.wall_s
    figures: dict[str, float] = {}
    if repeat.requests:
        figures["failed_share"] = 1 - len(done) / len(repeat.requests)
    if repeat.gaps is None and (emissions := sum(map(per_request.num_emissions, done))):
        figures["tokens_per_emission"] = sum(map(output_tokens, done)) / emissions
    if wall_s <= 0:
        return figures
    output = sum(map(output_tokens, done))
    inputs = sum(sample.input_tokens for sample in done)
    figures["output_tokens_per_s"] = output / wall_s
    figures["input_tokens_per_s"] = inputs / wall_s
    figures["total_tokens_per_s"] = (inputs + output) / wall_s
    figures["requests_per_s"] = len(done) / wall_s
    if limits:
        figures["goodput_rps"] = sum(meets_limits(sample, limits) for sample in done) / wall_s
    return figures


def latencies(repeat: Repeat) -> dict[str, float]:
    """Means and percentiles of one repeat."""
    done = [sample for sample in repeat.requests if not per_request.failed(sample)]
    figures: dict[str, float] = {}
    for name, measure in _LATENCIES.items():
        values = [value for sample in done if (value := measure(sample)) is not None]
        figures.update(_distribution(name, values))
    figures.update(group_figures(done))
    if repeat.gaps is None:
        return {**figures, **_distribution("itl_s", [gap for sample in done for gap in per_request.gaps_s(sample)])}
    return {**figures, **_of_histogram("itl_s", repeat.gaps)}


def _of_histogram(name: str, gaps: GapHistogram) -> dict[str, float]:
    if not gaps.num_gaps:
        return {}
    found = dict(zip(PERCENTILES, gaps.percentiles(PERCENTILES), strict=True))
    return {f"{name}_mean": gaps.mean_s, **{f"{name}_p{percentile}": value for percentile, value in found.items()}}


def _distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    figures = {f"{name}_mean": float(np.mean(values))}
    for percentile, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
        figures[f"{name}_p{percentile}"] = float(value)
    return figures
