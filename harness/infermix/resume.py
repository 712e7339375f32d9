"""What earlier runs left in the folder of a sweep: cells that are done, and baselines to judge by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from infermix.cell.simulation import is_simulated
from infermix.plugins import UNPACKAGED
from infermix.record.environment import package_versions
from infermix.record.record import Summary
from infermix.record.store import scan_records
from infermix.record.track import machine_of, workload_data

if TYPE_CHECKING:
    from infermix.compose import CellPlan
    from infermix.roles.component import Choice


#: Packages whose versions a kept record must share, beside the distributions of its components.
DECIDING = ("infermix", "torch", "transformers")


@dataclass(frozen=True)
class Found:
    """The latest record of a cell. `again` says why the cell runs again; empty: the record is kept."""

    path: Path
    again: str = ""


class Earlier:
    """Complete records of one folder, the latest per cell and machine. `warnings` name files that were skipped."""

    def __init__(self, directory: Path) -> None:
        scan = scan_records(directory, Summary)
        self.warnings = scan.warnings
        found = sorted(zip(scan.records, scan.paths, strict=True), key=_age)
        self._latest = {_key(record): (record, path) for record, path in found if record.complete}
        self._versions = package_versions()

    def find(self, plan: CellPlan) -> Found | None:
        """The latest record of a cell from this machine; `None` when there is none."""
        record, path = self._latest.get((plan.cell.digest, plan.machine.fingerprint), (None, None))
        return None if record is None or path is None else Found(path, self._again(record, plan))

    def _again(self, record: Summary, plan: CellPlan) -> str:
        """Failures are findings of one run; results stay while the versions that made them do."""
        if record.state not in ("ok", "invalid"):
            return f"ended in {record.state}" if record.state != "wrong" else "gave wrong results"
        if record.state == "invalid" and (plan.runs or record.reason != "; ".join(plan.reasons)):
            return "refused for other reasons"
        choices = (plan.engine, plan.workload, *plan.parts.values(), *plan.transforms, *plan.evaluators)
        recorded = record.environment.get("packages", {})
        return "" if same_versions(recorded, choices, self._versions) else "measured with other versions"

    def baseline(self, plan: CellPlan) -> Summary | None:
        """A baseline of the same model, workload, seed and machine, for a cell that runs without it (`--only`)."""
        ours = _planned_track(plan)
        for (_, fingerprint), (record, _) in self._latest.items():
            same_machine = fingerprint == plan.machine.fingerprint
            if record.baseline and same_machine and _recorded_track(record) == ours:
                return record
        return None


def same_track(plan: CellPlan, other: CellPlan) -> bool:
    """Whether two cells of one sweep may be compared."""
    return _planned_track(plan) == _planned_track(other)


def same_versions(recorded: Mapping[str, str], choices: Iterable[Choice], present: Mapping[str, str]) -> bool:
    """Whether a record names the present version of every deciding package, of every component's distribution, and
    of the libraries that the components require.
    """
    chosen = tuple(choices)
    libraries = {name for choice in chosen for name in choice.component.requires} - present.keys()
    present = {**present, **package_versions(libraries)}
    if any(recorded.get(name) != present.get(name) for name in (*DECIDING, *libraries)):
        return False
    plugins = {choice.registered.provenance for choice in chosen}
    return all(recorded.get(each.distribution, UNPACKAGED) == each.version for each in plugins)


def _age(found: tuple[Summary, Path]) -> tuple[str, int]:
    """Stamps count seconds; within one, the file that was written later is the later one."""
    record, path = found
    return record.created, path.stat().st_mtime_ns


def _key(record: Summary) -> tuple[str, str]:
    return record.cell_digest, str(machine_of(record).get("fingerprint", ""))


def _planned_track(plan: CellPlan) -> tuple[Any, ...]:
    experiment = msgspec.to_builtins(plan.cell.experiment)
    return _track(experiment, plan.device, plan.cell.data, is_simulated(plan))


def _recorded_track(record: Summary) -> tuple[Any, ...]:
    return _track(record.experiment, record.device, record.data, record.simulated)


def _track(experiment: dict[str, Any], device: str, data: Mapping[str, str], simulated: bool) -> tuple[Any, ...]:
    return (*(experiment.get(key) for key in ("model", "workload", "seed")), device, workload_data(data), simulated)
