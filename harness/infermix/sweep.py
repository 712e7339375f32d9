"""Run or resume a sweep: compose, skip what is done, run each cell in a process of its own, write its record."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from infermix.cell.assemble import assemble, planned_record
from infermix.cell.gates import check_gates
from infermix.compose import CellPlan, compose
from infermix.cost.machine import machine_facts, store_ceilings
from infermix.errors import UserError
from infermix.extra_plugins import load_extra_plugins
from infermix.failure import CellFailure
from infermix.interleave import paired_record, run_alone, run_in_turns
from infermix.isolate import Child
from infermix.measure.goodput import check_goodput
from infermix.measure.guards import check_guard_names
from infermix.plugins import load_catalogue
from infermix.progress import Silent, SweepProgress
from infermix.protocol import CeilingsDone, MeasureCeilings, Progress
from infermix.record.record import Record, Summary
from infermix.record.store import read_record, scan_records, write_record
from infermix.record.track import machine_of
from infermix.roles.facts import Ceilings
from infermix.spec.experiment import Cell
from infermix.spec.load import Sweep as SweepCells
from infermix.spec.load import load_experiment
from infermix.spec.naming import select_cells
from infermix.supervise import Supervised

_CEILINGS_LIMIT_S = 180.0

#: Digest of a cell, fingerprint of a machine.
CellKey = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run a sweep.

    `only`: glob on cell names. `fresh`: run cells again although their record is there. `profile`: a trace of one
    extra repeat per cell below `traces/`. `ceilings`: measure the machine's limits once where they are not stored.
    `extra_plugins`: modules or `.py` files that register components beside the installed ones.
    """

    only: str | None = None
    fresh: bool = False
    profile: bool = False
    ceilings: bool = True
    extra_plugins: tuple[str, ...] = ()
    progress: SweepProgress = field(default_factory=Silent)


def run_experiment(
    experiment: Path | str | Sequence[Cell],
    results_dir: Path | str | None = None,
    *,
    sets: Sequence[str] = (),
    options: RunOptions | None = None,
) -> list[Record]:
    """Run every cell that has no complete record from this machine yet; returns the records of all, in cell order.

    `experiment` is a YAML file or its cells; results go to `results/<experiment name>` unless said otherwise. Raises
    `UserError` for bad input and when a record cannot be written, `KeyboardInterrupt` on Ctrl-C; in both cases no
    process is left behind, and every record that was written is whole.
    """
    chosen = options or RunOptions()
    cells = load_experiment(experiment, sets) if isinstance(experiment, Path | str) else experiment
    directory = default_results_dir(cells) if results_dir is None else Path(results_dir)
    selected = cells.only(chosen.only) if isinstance(cells, SweepCells) else select_cells(cells, chosen.only)
    check_names(selected)
    prepare_directory(directory)
    catalogue = load_catalogue(load_extra_plugins(chosen.extra_plugins))
    sweep = Sweep(compose(selected, catalogue), directory, chosen)
    return sweep.run()


def default_results_dir(cells: Sequence[Cell]) -> Path:
    return Path("results") / cells[0].experiment.name


def check_names(cells: Iterable[Cell]) -> None:
    """Gates, guards and goodput limits are named by users: refuse unknown ones before anything runs."""
    for cell in cells:
        check_gates(cell.experiment.measure.gates)
        check_guard_names(cell.experiment.measure.guards)
        check_goodput(cell.experiment.measure.goodput)


def prepare_directory(directory: Path) -> None:
    """Raises `UserError` when records could not be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot be created: {error.strerror}", where=str(directory)) from error
    if not os.access(directory, os.W_OK):
        raise UserError("cannot be written to", where=str(directory), hint="choose another folder with --out")


class Sweep:
    """One run of a sweep. Baselines come first, because gates and turns need them."""

    def __init__(self, plans: Sequence[CellPlan], directory: Path, options: RunOptions) -> None:
        self._plans, self._directory, self._options = list(plans), directory, options
        self._progress = options.progress
        self._records: dict[str, Record] = {}
        self._written = 0

    def run(self) -> list[Record]:
        kept = self._kept_paths()
        for plan in self._plans:
            if plan.cell.digest in kept:
                self._records[plan.cell.digest] = read_record(kept[plan.cell.digest])
            elif not plan.runs:
                self._keep(planned_record(plan), complete=True)
        todo = [plan for plan in self._plans if plan.cell.digest not in self._records]
        self._progress.begin(len(self._plans), len(self._plans) - len(todo))
        try:
            self._run_all(self._with_ceilings(todo))
        finally:
            self._progress.end()
        return [self._records[plan.cell.digest] for plan in self._plans]

    def _run_all(self, plans: Sequence[CellPlan]) -> None:
        for plan in sorted(plans, key=lambda plan: (not plan.cell.baseline, plan.cell.index)):
            self._progress.cell(plan.cell.name)
            record = self._run_one(plan)
            self._keep(record)
            self._progress.done(record)

    def _run_one(self, plan: CellPlan) -> Record:
        baseline = self._baseline_of(plan)
        trace = self._trace_path(plan)
        if not plan.cell.experiment.measure.interleave or baseline is None or plan.cell.baseline:
            return assemble(plan, run_alone(plan, self._start, trace), self._records_of(baseline))
        turns = run_in_turns(plan, baseline, self._start, trace)
        theirs = self._records[baseline.cell.digest]
        record = assemble(plan, turns.candidate, theirs)
        if record.state == "ok":
            record.paired = paired_record(turns, theirs.run_id, plan.cell.experiment.measure.goodput)
        return record

    def _start(self, plan: CellPlan) -> Supervised:
        return Supervised(plan, extra_plugins=self._options.extra_plugins, on_progress=self._show)

    def _show(self, progress: Progress) -> None:
        self._progress.phase(progress.phase, progress.fraction)

    def _keep(self, record: Record, complete: bool = False) -> None:
        """Write a record. Raises `UserError` that says what is kept when it cannot be written."""
        record.complete = record.complete or complete
        try:
            write_record(record, self._directory)
        except UserError as error:
            message = f"{error.message}; {self._written} records of this run are kept in {self._directory}"
            raise UserError(message, where=error.where, key=error.key, hint=error.hint) from error
        self._records[record.cell_digest] = record
        self._written += 1

    def _kept_paths(self) -> dict[str, Path]:
        """Digest -> the latest complete record from this machine; a cell that can run now is not kept as invalid."""
        if self._options.fresh:
            return {}
        scan = scan_records(self._directory, Summary)
        for warning in scan.warnings:
            self._progress.note(warning)
        found = list(zip(scan.records, scan.paths, strict=True))
        latest = {_key(record): (record, path) for record, path in sorted(found, key=lambda pair: pair[0].created)}
        kept = {}
        for plan in self._plans:
            record, path = latest.get((plan.cell.digest, plan.machine.fingerprint), (None, None))
            if record is not None and path is not None and _still_holds(record, plan):
                kept[plan.cell.digest] = path
        return kept

    def _baseline_of(self, plan: CellPlan) -> CellPlan | None:
        """The baseline cell that ran and shares most of this cell's experiment; `None` for a baseline."""
        if plan.cell.baseline:
            return None
        candidates = [
            other
            for other in self._plans
            if other.cell.baseline and other.runs and other.cell.digest in self._records and _same_track(plan, other)
        ]
        return max(candidates, key=lambda other: _shared_overrides(plan, other), default=None)

    def _records_of(self, plan: CellPlan | None) -> Record | None:
        return None if plan is None else self._records[plan.cell.digest]

    def _trace_path(self, plan: CellPlan) -> Path | None:
        if not self._options.profile:
            return None
        name = "".join(letter if letter.isalnum() or letter in "=._-" else "_" for letter in plan.cell.name)
        return (self._directory / "traces" / f"{name[:80]}-{plan.cell.digest[:8]}.json").resolve()

    def _with_ceilings(self, plans: Sequence[CellPlan]) -> list[CellPlan]:
        """The plans with measured limits of their machine, measured now where they are not stored."""
        missing = {plan.device for plan in plans if plan.machine.ceilings.copy_bytes_per_s is None}
        if not self._options.ceilings or not missing:
            return list(plans)
        for device in sorted(missing):
            self._measure_ceilings(device)
        machines = {device: machine_facts(device) for device in missing}
        return [replace(plan, machine=machines.get(plan.device, plan.machine)) for plan in plans]

    def _measure_ceilings(self, device: str) -> None:
        self._progress.note(f"measuring the limits of this machine once ({device}): copy bandwidth, matmul rate")
        try:
            with Child(time_limit_s=_CEILINGS_LIMIT_S) as child:
                done = child.ask(MeasureCeilings(device=device), CeilingsDone, self._show)
                child.close()
        except CellFailure as failure:
            self._progress.note(f"no roofline: the limits of {device} could not be measured: {failure.reason}")
            return
        store_ceilings(
            machine_facts(device),
            Ceilings(done.copy_bytes_per_s, dict(done.matmul_flops_per_s), done.measured_at),
        )


def _key(record: Summary) -> CellKey:
    return record.cell_digest, str(machine_of(record).get("fingerprint", ""))


def _still_holds(record: Summary, plan: CellPlan) -> bool:
    """Whether a record need not be made again: complete, and for `invalid` still refused for the same reasons."""
    if not record.complete:
        return False
    if record.state == "invalid":
        return not plan.runs and record.reason == "; ".join(plan.reasons)
    return True


def _same_track(plan: CellPlan, other: CellPlan) -> bool:
    ours, theirs = plan.cell.experiment, other.cell.experiment
    return (ours.model, ours.workload, ours.seed, plan.device) == (
        theirs.model,
        theirs.workload,
        theirs.seed,
        other.device,
    )


def _shared_overrides(plan: CellPlan, other: CellPlan) -> int:
    return sum(other.cell.overrides.get(path) == value for path, value in plan.cell.overrides.items())
