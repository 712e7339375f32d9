"""`infermix predict FILE`: simulate the cells of measured records, and publish how far off the simulation is."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infermix.errors import UserError

if TYPE_CHECKING:
    from infermix.record.record import Record, Summary
    from infermix.spec.experiment import Cell

HELP = "simulate the cells of measured records and say how far off the simulation is"

EPILOG = """FILE is the experiment that was measured, DIR holds its records. Every cell that has an ok record there is
simulated with the same workload, arrivals and seed; the table says predicted over measured, minus one. Records that
the calibration was fitted to are marked: they do not count as held out."""

#: Figures that are compared, where both sides have them.
FIGURES = (
    "output_tokens_per_s", "ttft_s_p50", "ttft_s_p99", "tpot_s_p50", "tpot_s_p99", "itl_s_p50", "itl_s_p99",
    "e2e_s_p50",
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("file", type=Path, help="experiment (YAML)")
    parser.add_argument("--measured", type=Path, required=True, metavar="DIR", help="its measured records")
    parser.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="of `infermix calibrate`")
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="a.b=VALUE", help="as in the measured run"
    )
    parser.add_argument("--only", metavar="GLOB", help="the cells whose name matches")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of simulated records and of the error (default: DIR-predicted)",
    )


def execute(args: Namespace) -> int:
    """0 when at least one cell could be compared. Raises `UserError` for bad input."""
    from infermix.api import run
    from infermix.cost.calibration_file import read_step_times

    calibration = read_step_times(args.calibration)
    out = args.out or args.measured.with_name(args.measured.name + "-predicted")
    measured = _measured(args)
    engine = f"engine={{use: simulated, calibration: {json.dumps(str(args.calibration.resolve()))}}}"
    records = run(args.file, out=out, sets=[*args.sets, engine], only=args.only, ceilings=False, fresh=True)
    rows = list(_rows(measured, records, calibration.runs))
    if not rows:
        raise UserError("no cell has both a measured and a simulated result", where=str(args.measured))
    report = {"calibration": calibration.created, "machine": calibration.conditions.machine.name, "cells": rows}
    (out / "prediction_error.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    text = table(rows)
    (out / "PREDICTION_ERROR.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _measured(args: Namespace) -> dict[str, Summary]:
    """The latest ok record of each cell of the experiment, by the cell's name."""
    from infermix.record.record import Summary
    from infermix.record.store import scan_records

    cells = _cells(args)
    names = {cell.digest: cell.name for cell in cells}
    found: dict[str, Summary] = {}
    for record in sorted(scan_records(args.measured, Summary).records, key=lambda each: each.created):
        if record.cell_digest in names and record.state == "ok" and not record.simulated:
            found[names[record.cell_digest]] = record
    if not found:
        raise UserError(
            "holds no ok record of a cell of this experiment",
            where=str(args.measured),
            hint="give the folder of its records, and the same --set as in the measured run",
        )
    return found


def _cells(args: Namespace) -> Sequence[Cell]:
    from infermix.spec.load import load_experiment
    from infermix.spec.naming import select_cells

    return select_cells(load_experiment(args.file, args.sets), args.only)


def _rows(measured: dict[str, Summary], records: Sequence[Record], fitted: Sequence[str]) -> Iterator[dict[str, Any]]:
    for record in records:
        theirs = measured.get(record.cell)
        if theirs is None or record.state != "ok":
            continue
        both = [name for name in FIGURES if name in theirs.metrics and name in record.metrics]
        figures = {
            name: {"measured": theirs.metrics[name].value, "predicted": record.metrics[name].value,
                   "error": record.metrics[name].value / theirs.metrics[name].value - 1}
            for name in both
            if theirs.metrics[name].value
        }  # fmt: skip
        held_out = theirs.run_id not in fitted
        yield {
            "cell": record.cell, "measured": theirs.run_id, "predicted": record.run_id,
            "measured_verdict": theirs.verdict, "held_out": held_out, "figures": figures,
        }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: one row per cell, predicted over measured minus one; the last row is the largest error held out."""
    names = [name for name in FIGURES if any(name in row["figures"] for row in rows)]
    lines = ["| cell | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = [f"{row['figures'][name]['error']:+.1%}" if name in row["figures"] else "" for name in names]
        mark = "" if row["held_out"] else " (fitted to)"
        lines.append(f"| {row['cell']}{mark} | " + " | ".join(cells) + " |")
    held = [row for row in rows if row["held_out"]]
    worst = [
        max((abs(row["figures"][name]["error"]) for row in held if name in row["figures"]), default=0)
        for name in names
    ]
    if held:
        lines.append("| largest, held out | " + " | ".join(f"{value:.1%}" for value in worst) + " |")
    return "\n".join(lines) + "\n"
