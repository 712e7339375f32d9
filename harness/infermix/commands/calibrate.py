"""`infermix calibrate FILE`: measure steps and fit a model of their times, for `engine: simulated`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from infermix.errors import InfermixError, UserError

if TYPE_CHECKING:
    from infermix.compose import CellPlan
    from infermix.cost.calibration_file import Conditions, StepTimes
    from infermix.record.record import Record

HELP = "fit a model of step times to measured steps, for engine: simulated"

EPILOG = """Every cell of the experiment runs on the native engine with engine.step_log; cells may differ in workload
and scheduler alone. The file says under which conditions its coefficients hold, and how far they are from the steps.
"""

#: What may differ between the cells, since it only decides which steps there are.
_FREE_ROLES = frozenset({"scheduler"})


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("file", type=Path, help="experiment (YAML)")
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="a.b=VALUE", help="override one value"
    )
    parser.add_argument("--only", metavar="GLOB", help="run the cells whose name matches")
    parser.add_argument("--fresh", action="store_true", help="measure again where records are there")
    parser.add_argument("--records", type=Path, metavar="DIR", help="folder of the records (default: results/NAME)")
    parser.add_argument(
        "--out", type=Path, default=Path("calibration.json"), metavar="FILE", help="(default: calibration.json)"
    )


def execute(args: Namespace) -> int:
    """Raises `UserError` for bad input, `InfermixError` when a cell fails."""
    from infermix.api import plan, run
    from infermix.cost.calibration_file import write_step_times

    sets = [*args.sets, "engine.step_log=true"]
    records = run(args.file, out=args.records, sets=sets, only=args.only, fresh=args.fresh)
    plans = plan(args.file, sets=sets, only=args.only)
    found = step_times(plans, records)
    write_step_times(found, args.out)
    print(_told(found, args.out))
    return 0


def step_times(plans: Sequence[CellPlan], records: Sequence[Record]) -> StepTimes:
    """The fit over all steps of all repeats. Raises `UserError` when the cells are not of one kind."""
    from infermix.cost.calibration_file import make_step_times
    from infermix.measure.clock import utc_stamp

    failed = next((record for record in records if record.state != "ok"), None)
    if failed is not None:
        raise InfermixError(f"cell {failed.cell} ended as {failed.state}: {failed.reason}")
    rows = [row for record in records for repeat in record.repeats for row in repeat.environment.get("step_log", ())]
    return make_step_times(rows, _conditions(plans, records), utc_stamp(), [record.run_id for record in records])


def _conditions(plans: Sequence[CellPlan], records: Sequence[Record]) -> Conditions:
    from infermix.cost.calibration_file import Conditions, machine_of_facts
    from infermix.cost.machine import machine_facts

    kinds = [_kind(record) for record in records]
    for record, kind in zip(records, kinds, strict=True):
        differing = [name for name, value in kind.items() if value != kinds[0][name]]
        if differing:
            raise UserError(
                f"cells {records[0].cell!r} and {record.cell!r} differ in {', '.join(differing)}",
                key="sweep",
                hint="a calibration is of one mix: cells may differ in workload and scheduler",
            )
    first, plan = records[0], plans[0]
    assert plan.facts is not None
    machine = machine_facts(plan.device)
    return Conditions(
        machine=machine_of_facts(machine),
        model=str(first.model.get("label", "")),
        model_digest=plan.facts.digest,
        dtype=first.dtype,
        parts=kinds[0]["parts"],
        packages=first.environment.get("packages", {}),
        per_step=_per_step(plan, machine, first),
        num_threads=plan.cell.experiment.limits.num_threads,
    )


def _kind(record: Record) -> dict[str, Any]:
    """What decides how long a given step takes."""
    parts: dict[str, Any] = {
        role: {"name": part.name, "options": part.options}
        for role, part in record.parts.items()
        if role not in _FREE_ROLES
    }
    parts["transforms"] = [{"name": part.name, "options": part.options} for part in record.transforms]
    engine = record.engine
    parts["engine"] = {"name": engine.name, "options": engine.options} if engine else {}
    return {
        "model": record.model.get("digest"), "dtype": record.dtype, "device": record.device, "parts": parts,
        "num_threads": record.experiment.get("limits", {}).get("num_threads"),
    }  # fmt: skip


def _per_step(plan: CellPlan, machine: Any, record: Record) -> dict[str, float]:
    """Bytes and FLOPs of the mix, without the ceilings of the machine."""
    from infermix.cost.calibration_file import PER_STEP
    from infermix.cost.step_model import roofline
    from infermix.roles.component import Role

    assert plan.facts is not None
    quantizer = plan.parts[Role.QUANTIZER]
    found = roofline(
        plan.facts, machine.ceilings, plan.dtype,
        weight_bits=quantizer.component.weight_bits(quantizer.options),
        kv_bytes_per_token=record.memory.get("kv_bytes_per_token"),
    )  # fmt: skip
    if found is None:
        return {}
    return {name: getattr(found, name) for name in PER_STEP}


def _told(found: StepTimes, path: Path) -> str:
    residuals = msgspec.to_builtins(found.residuals)
    return (
        f"{residuals['steps']} steps; |predicted / measured - 1|: median {residuals['p50']:.1%}, "
        f"90 % within {residuals['p90']:.1%}, 99 % within {residuals['p99']:.1%}\nwrote {path}"
    )
