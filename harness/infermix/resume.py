"""What earlier runs left in the folder of a sweep: cells that are done, and baselines to judge by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from infermix.record.record import Summary
from infermix.record.store import scan_records
from infermix.record.track import machine_of

if TYPE_CHECKING:
    from infermix.compose import CellPlan


class Earlier:
    """Complete records of one folder, the latest per cell and machine. `warnings` name files that were skipped."""

    def __init__(self, directory: Path) -> None:
        scan = scan_records(directory, Summary)
        self.warnings = scan.warnings
        found = sorted(zip(scan.records, scan.paths, strict=True), key=lambda pair: pair[0].created)
        self._latest = {_key(record): (record, path) for record, path in found if record.complete}

    def done(self, plan: CellPlan) -> Path | None:
        """The record of a cell that need not run again: from this machine, and refused only if it still is."""
        record, path = self._latest.get((plan.cell.digest, plan.machine.fingerprint), (None, None))
        if record is None:
            return None
        if record.state == "invalid" and (plan.runs or record.reason != "; ".join(plan.reasons)):
            return None
        return path

    def baseline(self, plan: CellPlan) -> Summary | None:
        """A baseline of the same model, workload, seed and machine, for a cell that runs without it (`--only`)."""
        ours = _track(msgspec.to_builtins(plan.cell.experiment), plan.device)
        for (_, fingerprint), (record, _) in self._latest.items():
            same_machine = fingerprint == plan.machine.fingerprint
            if record.baseline and same_machine and _track(record.experiment, record.device) == ours:
                return record
        return None


def same_track(plan: CellPlan, other: CellPlan) -> bool:
    """Whether two cells of one sweep may be compared."""
    return _track(msgspec.to_builtins(plan.cell.experiment), plan.device) == _track(
        msgspec.to_builtins(other.cell.experiment), other.device
    )


def _key(record: Summary) -> tuple[str, str]:
    return record.cell_digest, str(machine_of(record).get("fingerprint", ""))


def _track(experiment: dict[str, Any], device: str) -> tuple[Any, ...]:
    return (*(experiment.get(key) for key in ("model", "workload", "seed")), device)
