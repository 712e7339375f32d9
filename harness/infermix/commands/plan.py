"""`infermix plan`: every cell with its verdict, nothing run."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from infermix.compose import CellPlan, compose
from infermix.plugins import load_catalogue
from infermix.report.render import MISSING, size
from infermix.spec.load import load_experiment

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = (
    "Say for every cell of an experiment whether it runs, through which adapters, or why not, with its predicted "
    "memory and its time limit. Nothing is run. Exit code 1 when no cell can run, 2 for bad input."
)
_FILE_WIDTH = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_experiment_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")


def add_experiment_arguments(parser: argparse.ArgumentParser) -> None:
    """What every verb that reads an experiment takes."""
    parser.add_argument("file", help="experiment (YAML)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", dest="sets", help="override, e.g. parts.kv=dense"
    )
    parser.add_argument("--only", metavar="GLOB", help="only the cells whose name matches, e.g. '*kv=paged*'")


def execute(args: argparse.Namespace) -> int:
    cells = load_experiment(args.file, args.sets).only(args.only)
    plans = compose(cells, load_catalogue())
    if args.json:
        print(json.dumps([_data(plan) for plan in plans], indent=2))
    else:
        _show(plans)
    return 0 if any(plan.runs for plan in plans) else 1


def _data(plan: CellPlan) -> dict[str, Any]:
    memory = plan.memory
    return {
        "cell": plan.cell.name,
        "digest": plan.cell.digest,
        "baseline": plan.cell.baseline,
        "runs": plan.runs,
        "reasons": list(plan.reasons),
        "notes": list(plan.notes),
        "adapters": dict(plan.adapters),
        "device": plan.device,
        "dtype": plan.dtype,
        "engine": plan.engine.component.name,
        "parts": {role.value: choice.component.name for role, choice in plan.parts.items()},
        "transforms": [choice.component.name for choice in plan.transforms],
        "overrides": plan.cell.overrides,
        "time_limit_s": plan.time_limit_s,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "sequences_that_fit": plan.sequences_that_fit,
        "memory": memory
        and {
            "weights_bytes": memory.weights_bytes,
            "kv_bytes": memory.kv_bytes,
            "activation_bytes": memory.activation_bytes,
            "total_bytes": memory.total_bytes,
        },
    }


def _show(plans: list[CellPlan]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(_table(plans))
    for plan in plans:
        for reason in (*plan.reasons, *(plan.notes if plan.runs else ())):
            console.print(f"{plan.cell.name}: {reason}", markup=False, soft_wrap=True)
    running = [plan for plan in plans if plan.runs]
    machine, limit = plans[0].machine, sum(plan.time_limit_s for plan in running)
    console.print(
        f"{len(running)} of {len(plans)} cells run on {machine.device} ({machine.name}), at most {_duration(limit)}; "
        "* marks the baseline",
        markup=False,
    )


def _table(plans: list[CellPlan]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("cell", overflow="fold")
    for title in ("verdict", "dtype"):
        table.add_column(title, no_wrap=True)
    for title in ("memory", "sequences that fit", "limit"):
        table.add_column(title, justify="right", no_wrap=True)
    for plan in plans:
        name = plan.cell.name + (" *" if plan.cell.baseline else "")
        verdict = Text(_verdict(plan), style="green" if plan.runs else "red")
        memory = size(plan.memory.total_bytes) if plan.memory else MISSING
        table.add_row(Text(name), verdict, plan.dtype, memory, _fitting(plan), _duration(plan.time_limit_s))
    return table


def _fitting(plan: CellPlan) -> str:
    """How many sequences of the cell's longest length the KV memory holds, such as `118 x 4,096 tokens`."""
    if plan.sequences_that_fit is None:
        return MISSING
    return f"{plan.sequences_that_fit:,} x {plan.max_model_len:,} tokens"


def _verdict(plan: CellPlan) -> str:
    if not plan.runs:
        return "invalid"
    via = ", ".join(sorted(set(plan.adapters.values())))
    return f"runs via {via}" if via else "runs"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
