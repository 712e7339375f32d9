"""What was asked for beside what executed, per part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from infermix.record.record import PartRecord

if TYPE_CHECKING:
    from infermix.compose import CellPlan
    from infermix.roles.component import Choice
    from infermix.roles.engine import EngineReport


def engine_record(plan: CellPlan, report: EngineReport) -> PartRecord:
    return _record(plan.engine, report.executed.get("engine", {}))


def part_records(plan: CellPlan, report: EngineReport) -> dict[str, PartRecord]:
    """One entry per role that the engine hosts."""
    return {role.value: _record(choice, report.executed.get(role.value, {})) for role, choice in plan.parts.items()}


def transform_records(plan: CellPlan, report: EngineReport) -> list[PartRecord]:
    """One entry per transform that was asked for, in order; `executed` stays empty for one that was not applied."""
    applied = {entry["name"]: entry for entry in report.executed.get("transforms", [])}
    return [_record(choice, applied.get(choice.component.name, {})) for choice in plan.transforms]


def planned_transforms(plan: CellPlan) -> list[PartRecord]:
    return [_record(choice, {}) for choice in plan.transforms]


def planned_parts(plan: CellPlan) -> dict[str, PartRecord]:
    """The parts of a cell that did not get far enough to say what executed."""
    return {role.value: _record(choice, {}) for role, choice in plan.parts.items()}


def planned_engine(plan: CellPlan) -> PartRecord:
    return _record(plan.engine, {})


def _record(choice: Choice, executed: dict[str, Any]) -> PartRecord:
    component, provenance = choice.component, choice.registered.provenance
    return PartRecord(
        name=component.name,
        options=msgspec.to_builtins(choice.options),
        distribution=provenance.distribution,
        version=provenance.version,
        lossless=component.lossless(choice.options),
        via=dict(choice.via),
        executed=executed,
    )
