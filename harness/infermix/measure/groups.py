"""Latencies of every class of requests and of every tenant: what a policy gives to one it takes from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from infermix.measure import goodput as per_request
from infermix.record.record import RequestSample

#: How the name of a tenant is told from that of a category, in `NAME[GROUP]`.
TENANT = "tenant:"

_LATENCIES: Mapping[str, Callable[[RequestSample], float | None]] = {
    "ttft_s": per_request.ttft_s,
    "tpot_s": per_request.tpot_s,
    "e2e_s": per_request.e2e_s,
}
#: Of each latency: median, tail, and the worst request, which is what a bound on waiting is about.
STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "p50": lambda values: float(np.percentile(values, 50)),
    "p99": lambda values: float(np.percentile(values, 99)),
    "max": max,
}


def of_group(name: str, group: str) -> str:
    """The name of a metric over the requests of one group."""
    return f"{name}[{group}]"


def group_figures(samples: Sequence[RequestSample]) -> dict[str, float]:
    """`ttft_s_p99[chat]`, `tpot_s_mean[tenant:acme]`, ...: of categories wherever there are any, of tenants where
    there are several. `samples` are those that did not fail.
    """
    figures: dict[str, float] = {}
    for group, members in _groups(samples):
        for latency, measure in _LATENCIES.items():
            values = [value for sample in members if (value := measure(sample)) is not None]
            if values:
                for statistic, of in STATISTICS.items():
                    figures[of_group(f"{latency}_{statistic}", group)] = of(values)
    return figures


def _groups(samples: Sequence[RequestSample]) -> Iterator[tuple[str, list[RequestSample]]]:
    by_category: dict[str, list[RequestSample]] = {}
    by_tenant: dict[str, list[RequestSample]] = {}
    for sample in samples:
        by_category.setdefault(sample.category, []).append(sample)
        by_tenant.setdefault(sample.tenant, []).append(sample)
    by_category.pop("", None)
    yield from by_category.items()
    if len(by_tenant) > 1:
        yield from ((f"{TENANT}{name}", members) for name, members in by_tenant.items())
