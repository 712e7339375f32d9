"""Seconds, bytes and rates for people, and text tables. The only place where units are made pretty."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rich.table import Table
from rich.text import Text

from infermix.record.record import Verdict
from infermix.report.ranking import Figure

VERDICT_STYLE: dict[Verdict, str] = {"green": "green", "yellow": "yellow", "red": "bold red"}
MISSING = "-"


def number(value: float, digits: int = 4) -> str:
    """Plain decimal with `digits` significant digits and thousands separators: `6,248`, `0.01230`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 12)}f}"


def seconds(value: float) -> str:
    """`1.23 s`, `12.3 ms`, `45.6 us`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{number(value / scale, 3)} {unit}"
    return f"{number(value * 1e9, 3)} ns" if value else "0 s"


def size(value: float) -> str:
    """Decimal units: `1.68 GB`, `269 MB`, `960 B`."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= scale:
            return f"{number(value / scale, 3)} {unit}"
    return f"{value:.0f} B"


def share(value: float) -> str:
    return f"{value * 100:.1f} %"


def signed_percent(value: float) -> str:
    return f"{value * 100:+.1f} %"


def times(value: float) -> str:
    """A ratio: `1.23x`."""
    return f"{number(value, 3)}x"


FORMATS: dict[str, Callable[[float], str]] = {
    "number": number,
    "s": seconds,
    "bytes": size,
    "share": share,
    "ratio": times,
}
UNIT_KINDS = {"s": "s", "seconds": "s", "bytes": "bytes", "B": "bytes", "share": "share", "ratio": "share"}


def by_unit(value: float, unit: str) -> str:
    """A figure with the unit that its record gives."""
    kind = UNIT_KINDS.get(unit)
    if kind:
        return FORMATS[kind](value)
    return f"{number(value)} {unit}".strip()


def interval(figure: Figure, kind: str = "number") -> str:
    """`123.4 [119.0, 127.8]`; the bare value without an interval."""
    pretty = FORMATS[kind]
    if figure.low is None or figure.high is None:
        return pretty(figure.value)
    return f"{pretty(figure.value)} [{pretty(figure.low)}, {pretty(figure.high)}]"


def text_table(
    headers: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str = "", right: Iterable[int] = ()
) -> Table:
    """A rich table; the columns in `right` are aligned for figures."""
    table = Table(title=title or None, title_justify="left", header_style="bold")
    aligned = set(right)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in aligned else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


def histogram(values: Sequence[float], pretty: Callable[[float], str], bins: int = 10, width: int = 40) -> list[str]:
    """Lines of text: range, bar, count."""
    low, high = min(values), max(values)
    if low == high:
        return [f"{pretty(low)}  {'#' * width} {len(values)}"]
    step = (high - low) / bins
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / step))] += 1
    edges = [f"{pretty(low + i * step)} to {pretty(low + (i + 1) * step)}" for i in range(bins)]
    margin, top = max(map(len, edges)), max(counts)
    return [
        f"{edge:>{margin}}  {'#' * math.ceil(width * count / top):<{width}} {count}"
        for edge, count in zip(edges, counts, strict=True)
    ]
