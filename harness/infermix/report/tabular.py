"""leaderboard.csv and leaderboard.json: raw numbers in base units."""

from __future__ import annotations

import csv
import io
from typing import Any

import msgspec

from infermix.record.record import SCHEMA_VERSION, Metric
from infermix.report.board import MEMORY_KEYS, METRIC_KEYS, ROOFLINE_KEYS, SPECIAL_KEYS, SPEED, Board, Row, Table
from infermix.report.effects import Effect, Effects
from infermix.report.labels import MIX_COLUMNS
from infermix.report.ranking import Figure

FIGURE_KEYS = (*METRIC_KEYS, "ratio", *MEMORY_KEYS, "bits_per_weight", "quantize_s", *ROOFLINE_KEYS)
INTERVAL_KEYS = (SPEED, "ratio")


def csv_text(board: Board) -> str:
    """One line per row of every table; empty where a row publishes no such figure."""
    quality = sorted({f"quality:{name}" for table in board.tables for name in table.quality_names})
    rows = [_flat(table, row) for table in board.tables for row in table.rows]
    present = {key for row in rows for key in row}
    fields = [*_flat_fields(), *(key for key in SPECIAL_KEYS if key in present), *quality]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fields, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def json_text(board: Board) -> str:
    """The board as data: tables with conditions, rows with figures and intervals, effects."""
    data = {
        "generated_by": "infermix leaderboard",
        "record_schema_version": SCHEMA_VERSION,
        "tables": [_table(table) for table in board.tables],
        "unfinished": board.unfinished,
        "warnings": list(board.warnings),
    }
    return msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n"


def _flat_fields() -> list[str]:
    bounds = [f"{key}_{bound}" for key in INTERVAL_KEYS for bound in ("low", "high")]
    return [
        *("track", "title", "rank", "rank_mark", "state", "reason", "verdict", "experiment", "cell", "cell_digest"),
        *("run_id", "created", "baseline", *MIX_COLUMNS, *FIGURE_KEYS, *bounds, "limit", "notes", "concerns"),
    ]


def _flat(table: Table, row: Row) -> dict[str, Any]:
    figures: dict[str, Any] = {key: _rounded(figure.value) for key, figure in row.figures.items()}
    for key in INTERVAL_KEYS:
        if key in row.figures:
            figures[f"{key}_low"] = _rounded(row.figures[key].low)
            figures[f"{key}_high"] = _rounded(row.figures[key].high)
    return {
        **_identity(row),
        "track": table.track,
        "title": table.title,
        **row.mix,
        **figures,
        "notes": "; ".join(row.notes),
        "concerns": "; ".join(row.concerns),
    }


def _identity(row: Row) -> dict[str, Any]:
    record = row.record
    return {
        "rank": row.rank.number if row.rank else None,
        "rank_mark": row.rank.mark if row.rank else "",
        "state": record.state,
        "reason": record.reason,
        "verdict": record.verdict,
        "experiment": record.experiment_name,
        "cell": record.cell,
        "cell_digest": record.cell_digest,
        "run_id": record.run_id,
        "created": record.created,
        "baseline": row.is_baseline,
        "limit": row.limit,
    }


def _table(table: Table) -> dict[str, Any]:
    return {
        "track": table.track,
        "title": table.title,
        "conditions": dict(table.conditions),
        "cautions": list(table.cautions),
        "rows": [_row(row) for row in table.rows],
        "effects": _effects(table.effects) if table.effects else None,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        **_identity(row),
        "mix": dict(row.mix),
        "figures": {key: _figure(figure) for key, figure in sorted(row.figures.items())},
        "groups": {name: _rounded(each.value) for name, each in _groups(row).items()},
        "superseded": row.superseded,
        "notes": row.notes,
        "concerns": row.concerns,
    }


def _groups(row: Row) -> dict[str, Metric]:
    """Figures of classes and tenants, in the names of the record's metrics."""
    found = row.record.metrics if row.rank else {}
    return {name: found[name] for name in sorted(found) if name.endswith("]") and "[" in name}


def _figure(figure: Figure) -> dict[str, float | None]:
    found = {"value": _rounded(figure.value)}
    if figure.has_interval:
        found |= {"low": _rounded(figure.low), "high": _rounded(figure.high)}
    return found


def _effects(effects: Effects) -> dict[str, Any]:
    return {
        "metric": effects.metric,
        "reference": dict(effects.reference),
        "explained": _rounded(effects.explained),
        "main": [_effect(effect) for effect in effects.main],
        "interactions": [_effect(effect) for effect in effects.interactions],
        "notes": list(effects.notes),
    }


def _effect(effect: Effect) -> dict[str, Any]:
    return {
        "levels": dict(effect.levels),
        "ratio": _rounded(effect.ratio),
        "low": _rounded(effect.low),
        "high": _rounded(effect.high),
        "cells": effect.cells,
    }


def _rounded(value: float | None) -> float | None:
    """Eight significant digits: more would differ between machines that generate from the same records."""
    return None if value is None else float(f"{value:.8g}")
