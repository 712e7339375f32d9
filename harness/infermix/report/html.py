"""leaderboard.html: one self-contained page, no request leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment

from infermix.report.board import Board, Row, Table
from infermix.report.columns import Column, figure_columns, quality_columns
from infermix.report.groups import GROUP_LEGEND, group_text, groups_of
from infermix.report.labels import ABSENT, MIX_COLUMNS
from infermix.report.markdown import LEGEND, effect_name, effect_remark, effect_text, strongest_interactions
from infermix.report.scatter import HEIGHT, WIDTH, Scatter, scatter


@dataclass(frozen=True)
class Cell:
    """A table cell: text, value to sort by, tone."""

    text: str
    sort: str = ""
    css: str = ""


@dataclass(frozen=True)
class Section:
    """What the template needs of one table. `filters` maps mix column -> label per row, for the role
    filters.
    """

    table: Table
    headers: Sequence[tuple[str, str, bool]]
    rows: Sequence[tuple[Row, Sequence[Cell]]]
    plot: Scatter | None
    main: Sequence[tuple[str, str, int, str]]
    interactions: Sequence[tuple[str, str, int, str]]
    groups: Sequence[str] = ()
    group_rows: Sequence[Sequence[str]] = ()


def html(board: Board) -> str:
    """The whole page."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = files("infermix.report").joinpath("templates", "leaderboard.html").read_text(encoding="utf-8")
    filters = _filters(board)
    return environment.from_string(source).render(
        board=board,
        sections=[_section(table) for table in board.tables],
        filters=filters,
        group_legend=GROUP_LEGEND,
        legend=LEGEND.replace("`", ""),
        width=WIDTH,
        height=HEIGHT,
    )


def _filters(board: Board) -> list[tuple[str, list[str]]]:
    """Mix columns with more than one label anywhere, and the states."""
    rows = [row for table in board.tables for row in table.rows]
    found = [(column, sorted({row.mix[column] for row in rows} - {ABSENT})) for column in MIX_COLUMNS]
    found.append(("state", sorted({row.record.state for row in rows})))
    return [(column, labels) for column, labels in found if len(labels) > 1]


def _section(table: Table) -> Section:
    columns = [*figure_columns(table), *quality_columns(table)]
    headers = [("rank", "Rows with = show no significant difference from the best of their rank", True)]
    headers += [(column, f"{column} of the mix", False) for column in table.mix_columns]
    headers += [(column.header, column.help, True) for column in columns]
    headers += [("limit", "The hardware limit that binds", False), ("verdict", "The worst guard", False)]
    headers += [("notes", "Adapters, lossy parts, reasons", False)]
    effects, groups = table.effects, groups_of(table)
    return Section(
        table=table,
        headers=headers,
        rows=[(row, _cells(row, table, columns)) for row in table.rows],
        plot=scatter(table),
        main=_effects(effects.main) if effects else (),
        interactions=_effects(strongest_interactions(effects)) if effects else (),
        groups=groups,
        group_rows=[_group_row(table, row, groups) for row in table.rows if row.rank and groups],
    )


def _group_row(table: Table, row: Row, groups: Sequence[str]) -> list[str]:
    return [*(row.mix[column] for column in table.mix_columns), *(group_text(row, name) for name in groups)]


def _effects(found: Sequence) -> list[tuple[str, str, int, str]]:
    return [(effect_name(each), effect_text(each), each.cells, effect_remark(each)) for each in found]


def _cells(row: Row, table: Table, columns: Sequence[Column]) -> list[Cell]:
    place = str(row.rank) if row.rank else row.record.state
    cells = [Cell(place, str(row.rank.number if row.rank else 10**9), "rank" if row.rank else "state")]
    cells += [Cell(row.mix[column]) for column in table.mix_columns]
    for column in columns:
        figure = column.value(row)
        cells.append(Cell(column.text(row), f"{figure.value:.8g}" if figure else "", "figure"))
    verdict = row.record.verdict if row.record.state == "ok" else ""
    return [*cells, Cell(row.limit), Cell(verdict, css=f"verdict {verdict}".strip()), Cell(_notes(row), css="notes")]


def _notes(row: Row) -> str:
    texts = ["baseline"] if row.is_baseline else []
    texts += [row.record.reason] if row.record.state != "ok" and row.record.reason else []
    return "; ".join([*texts, *row.notes, *(row.concerns if row.rank else ())])
