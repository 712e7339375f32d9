"""Leaderboard, comparison and record as rich renderables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from infermix.record.record import Metric
from infermix.report import render
from infermix.report.board import SPEED, Row, Table
from infermix.report.columns import figure_columns, quality_columns
from infermix.report.compare import Difference
from infermix.report.labels import adapters

#: What fits on a terminal; the files hold everything.
TERMINAL_FIGURES = frozenset({SPEED, "ratio", "ttft_s_p50", "tpot_s_p50", "mean_acceptance_length", "peak_bytes"})
PIPED_WIDTH = 200
OUTCOME_STYLE = {"better": "green", "worse": "bold red", "different": "yellow"}


def leaderboard_table(table: Table, limit: int | None = None) -> RichTable:
    """The first `limit` rows of a track."""
    columns = [column for column in figure_columns(table) if column.key in TERMINAL_FIGURES]
    columns += quality_columns(table)[:1]
    first = 1 + len(table.mix_columns)
    headers = ["rank", *table.mix_columns, *(column.header for column in columns), "verdict"]
    rows: list[list[str | Text]] = [
        [
            str(row.rank or row.record.state),
            *(row.mix[column] for column in table.mix_columns),
            *(column.text(row) for column in columns),
            verdict_text(row),
        ]
        for row in table.rows[:limit]
    ]
    return render.text_table(headers, rows, right=range(first, first + len(columns)))


def terminal_console() -> Console:
    """As wide as the terminal; into a pipe or a file, wide enough that no table is squeezed."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def verdict_text(row: Row) -> Text:
    """The colour of an ok row with the guards behind it and the adapters in use, `yellow: self_check; via gather`.

    The reason of any other row is a line of its own (`reasons`).
    """
    record = row.record
    if record.state != "ok":
        return Text("see below", style="red")
    worst = [guard.name for guard in record.guards if guard.verdict == record.verdict != "green"]
    text = Text(record.verdict, style=render.VERDICT_STYLE[record.verdict])
    text.append(f": {', '.join(worst)}" if worst else "")
    via = adapters(record)
    return text.append(f"; via {', '.join(via)}" if via else "", style="default")


def reasons(table: Table, limit: int | None = None) -> list[str]:
    """One line for every shown row that is not ok."""
    failed = [row for row in table.rows[:limit] if row.record.state != "ok"]
    return [f"{row.record.cell}: {row.record.state}: {row.record.reason}" for row in failed]


def difference_table(differences: Sequence[Difference], title: str) -> RichTable:
    """A, B, change with its interval, what could have been seen, and the outcome."""
    headers = ["metric", "A", "B", "change", "95 % interval", "visible from", "outcome", "from"]
    return render.text_table(headers, [_difference_row(each) for each in differences], title, right=range(1, 6))


def _difference_row(found: Difference) -> list[str | Text]:
    interval = ""
    if found.low is not None and found.high is not None:
        interval = f"{render.signed_percent(found.low)} to {render.signed_percent(found.high)}"
    basis = found.method if found.method == "single values" else f"{found.method} ({_counts(found.samples)})"
    return [
        found.metric,
        render.by_unit(found.a, found.unit),
        render.by_unit(found.b, found.unit),
        render.signed_percent(found.relative),
        interval,
        "" if found.detectable is None else render.share(found.detectable),
        Text(found.outcome, style=OUTCOME_STYLE.get(found.outcome, "")),
        basis,
    ]


def _counts(samples: tuple[int, int]) -> str:
    return str(samples[0]) if samples[0] == samples[1] else f"{samples[0]} and {samples[1]}"


def metric_row(name: str, metric: Metric) -> list[str]:
    """Name, value, interval, number of repeats."""
    interval = ""
    if metric.ci_low is not None and metric.ci_high is not None:
        interval = f"{render.by_unit(metric.ci_low, metric.unit)} to {render.by_unit(metric.ci_high, metric.unit)}"
    return [name, render.by_unit(metric.value, metric.unit), interval, str(len(metric.samples) or 1)]


def fields_table(fields: dict[str, Any], title: str = "") -> RichTable:
    """Two columns; nested data is flattened to dotted names."""
    table = render.text_table(["", ""], [[name, value] for name, value in flat(fields)], title)
    table.show_header = False
    return table


def flat(fields: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted name -> text, empty values left out."""
    found: list[tuple[str, str]] = []
    for key, value in fields.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found += flat(value, f"{name}.")
        elif value not in (None, "", [], ()):
            found.append((name, _text(name, value)))
    return found


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(name, value)
    if isinstance(value, list | tuple):
        return ", ".join(_text("", item) for item in value)
    return str(value)


def _number(name: str, value: float) -> str:
    if name.endswith(("_bytes", "bytes_per_token")):
        return render.size(value)
    if name.endswith("bytes_per_s"):
        return f"{render.size(value)}/s"
    if name.endswith(("_s", ".s")) and not name.endswith("per_s"):
        return render.seconds(value)
    return f"{value:,.0f}" if float(value).is_integer() else render.number(value)
