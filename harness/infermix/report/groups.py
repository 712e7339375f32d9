"""Latencies of classes and tenants beside each other, per row."""

from __future__ import annotations

from collections.abc import Sequence

from infermix.measure.groups import of_group
from infermix.report import render
from infermix.report.board import Row, Table

GROUP_LEGEND = (
    "Latency of the requests of each class (and tenant): TTFT median / 99th percentile / worst, then TPOT median / "
    "99th percentile."
)
#: More columns than these say nothing to a reader; the figures are in the records.
MOST_GROUPS = 8
_PREFIX = "ttft_s_max["


def groups_of(table: Table) -> Sequence[str]:
    """In alphabetic order; none unless there are several, and not too many."""
    names = {name for row in table.rows if row.rank for name in row.record.metrics}
    found = sorted(name[len(_PREFIX) : -1] for name in names if name.startswith(_PREFIX))
    return found if 1 < len(found) <= MOST_GROUPS else ()


def group_text(row: Row, group: str) -> str:
    """`41.2 ms / 103 ms / 120 ms, 9.1 ms / 11 ms`; empty where the row has no request of the group."""
    ttft = [_text(row, f"ttft_s_{statistic}", group) for statistic in ("p50", "p99", "max")]
    tpot = [_text(row, f"tpot_s_{statistic}", group) for statistic in ("p50", "p99")]
    return ", ".join(" / ".join(part) for part in (ttft, tpot) if all(part))


def _text(row: Row, name: str, group: str) -> str:
    metric = row.record.metrics.get(of_group(name, group))
    return render.seconds(metric.value) if metric else ""
