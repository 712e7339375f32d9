"""Run or resume a sweep: compose, skip what is done, run each cell in a process of its own, write its record."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infermix.cell.answers import Answers
from infermix.cell.assemble import assemble, planned_record
from infermix.compose import CellPlan, compose
from infermix.cost.machine import machine_facts, store_ceilings
from infermix.errors import UserError
from infermix.extra_plugins import load_extra_plugins
from infermix.failure import CellFailure
from infermix.interleave import paired_record, run_alone, run_in_turns
from infermix.isolate import Child
from infermix.plugins import load_catalogue
from infermix.progress import Silent, Start, SweepProgress
from infermix.protocol import CeilingsDone, Done, MeasureCeilings, Prepare, Progress
from infermix.record.environment import capture_environment
from infermix.record.record import Record, Summary
from infermix.record.store import read_record, write_record
from infermix.resume import Earlier, same_track
from infermix.roles.facts import Ceilings
from infermix.spec.experiment import Cell
from infermix.spec.load import Sweep as SweepCells
from infermix.spec.load import load_experiment
from infermix.spec.naming import select_cells
from infermix.supervise import Supervised

_CEILINGS_LIMIT_S = 180.0
#: A job before a cell may quantize a large model on a slow machine.
_JOB_LIMIT_S = 4 * 3600.0


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


MakeSweep = Callable[[Sequence[CellPlan], Path, RunOptions], "Sweep"]


def run_experiment(
    experiment: Path | str | Sequence[Cell],
    results_dir: Path | str | None = None,
    *,
    sets: Sequence[str] = (),
    options: RunOptions | None = None,
    sweep: MakeSweep | None = None,
) -> list[Record]:
    """Run every cell that has no result to keep (see `infermix.resume`); returns the records of all, in cell order.

    `experiment` is a YAML file or its cells; results go to `results/<experiment name>` unless said otherwise. `sweep`
    makes another kind of `Sweep`. Raises
    `UserError` for bad input and when a record cannot be written, `KeyboardInterrupt` on Ctrl-C; in both cases no
    process is left behind, and every record that was written is whole.
    """
    chosen = options or RunOptions()
    cells = load_experiment(experiment, sets) if isinstance(experiment, Path | str) else experiment
    directory = default_results_dir(cells) if results_dir is None else Path(results_dir)
    selected = cells.only(chosen.only) if isinstance(cells, SweepCells) else select_cells(cells, chosen.only)
    catalogue = load_catalogue(load_extra_plugins(chosen.extra_plugins))
    plans = compose(selected, catalogue)
    prepare_directory(directory)
    return (sweep or Sweep)(plans, directory, chosen).run()


def default_results_dir(cells: Sequence[Cell]) -> Path:
    return Path("results") / cells[0].experiment.name


def prepare_directory(directory: Path) -> None:
    """Raises `UserError` when records could not be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot be created: {error.strerror}", where=str(directory)) from error
    if not os.access(directory, os.W_OK):
        raise UserError("cannot be written to", where=str(directory), hint="choose another folder with --out")


def with_environment(plan: CellPlan) -> CellPlan:
    """Refuse an engine that asks for an environment of its own: `isolate.Child(python=...)` would start one."""
    environment = plan.engine.component.environment
    if environment is None:
        return plan
    reason = (
        f"engine {plan.engine.component.name!r} needs the environment {environment.name!r}, which is not built here"
    )
    return replace(plan, runs=False, reasons=(*plan.reasons, reason))


class Sweep:
    """One run of a sweep. Baselines come first, because gates and turns need them."""

    def __init__(self, plans: Sequence[CellPlan], directory: Path, options: RunOptions) -> None:
        self._plans, self._directory, self._options = [with_environment(plan) for plan in plans], directory, options
        self._progress = options.progress
        self._earlier = Earlier(directory)
        self._records: dict[str, Record] = {}
        self._environments: dict[str, dict[str, Any]] = {}
        self._written = 0

    def run(self) -> list[Record]:
        for warning in self._earlier.warnings:
            self._progress.note(warning)
        todo = self._open()
        try:
            self._run_all(self._with_ceilings(todo))
        finally:
            self._progress.end()
        return [self._records[plan.cell.digest] for plan in self._plans]

    def _open(self) -> list[CellPlan]:
        """Take over what is kept, write what is refused, and return what is left to run."""
        kept, again = 0, Counter[str]()
        for plan in self._plans:
            found = None if self._options.fresh else self._earlier.find(plan)
            if found is not None and not found.again:
                self._records[plan.cell.digest] = read_record(found.path)
                kept += 1
            elif not plan.runs:
                self._keep(planned_record(plan, self._environment(plan)), complete=True)
            elif found is not None:
                again[found.again] += 1
        todo = [plan for plan in self._plans if plan.cell.digest not in self._records]
        refused = len(self._plans) - kept - len(todo)
        self._progress.begin(Start(total=len(self._plans), kept=kept, refused=refused, again=again))
        return todo

    def _run_all(self, plans: Sequence[CellPlan]) -> None:
        for plan in sorted(plans, key=lambda plan: (not plan.cell.baseline, plan.cell.index)):
            self._progress.cell(plan.cell.name)
            failed = self._prepare(plan)
            record = self._run_one(plan) if failed is None else self._without_job(plan, failed)
            self._keep(record)
            self._progress.done(record)

    def _prepare(self, plan: CellPlan) -> CellFailure | None:
        """Do the jobs of parts that work in an environment of their own; why that failed, or `None`."""
        if all(choice.component.environment is None for choice in plan.parts.values()):
            return None
        limits = plan.cell.experiment.limits
        try:
            limit = "the limit of a job before a cell"
            with Child(time_limit_s=_JOB_LIMIT_S, num_threads=limits.num_threads, limit=limit) as child:
                command = Prepare(cell=plan.cell, extra_plugins=self._options.extra_plugins)
                for note in child.ask(command, Done, self._show).notes:
                    self._progress.note(note)
                child.close()
        except CellFailure as failure:
            return failure
        return None

    def _without_job(self, plan: CellPlan, failure: CellFailure) -> Record:
        return assemble(plan, Answers(failure=failure), None, self._environment(plan))

    def _run_one(self, plan: CellPlan) -> Record:
        baseline = self._baseline_of(plan)
        trace = self._trace_path(plan)
        if not plan.cell.experiment.measure.interleave or baseline is None or plan.cell.baseline:
            answers = run_alone(plan, self._start, trace)
            return assemble(plan, answers, self._judged_by(plan, baseline), self._environment(plan))
        turns = run_in_turns(plan, baseline, self._start, trace)
        theirs = self._records[baseline.cell.digest]
        record = assemble(plan, turns.candidate, theirs, self._environment(plan))
        if record.state == "ok":
            record.paired = paired_record(turns, theirs.run_id, plan.cell.experiment.measure.goodput)
        return record

    def _environment(self, plan: CellPlan) -> dict[str, Any]:
        """Captured once per device: it asks git and NVML."""
        if plan.device not in self._environments:
            self._environments[plan.device] = capture_environment(plan.machine, plan.device)
        return self._environments[plan.device]

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

    def _baseline_of(self, plan: CellPlan) -> CellPlan | None:
        """The baseline cell that ran and shares most of this cell's experiment; `None` for a baseline."""
        if plan.cell.baseline:
            return None
        candidates = [
            other
            for other in self._plans
            if other.cell.baseline and other.runs and other.cell.digest in self._records and same_track(plan, other)
        ]
        return max(candidates, key=lambda other: _shared_overrides(plan, other), default=None)

    def _judged_by(self, plan: CellPlan, baseline: CellPlan | None) -> Summary | None:
        """The record that the gates compare with: of this sweep, or an earlier one when `--only` left it out."""
        if plan.cell.baseline:
            return None
        return self._earlier.baseline(plan) if baseline is None else self._records[baseline.cell.digest]

    def _trace_path(self, plan: CellPlan) -> Path | None:
        if not self._options.profile:
            return None
        name = "".join(letter if letter.isalnum() or letter in "=._-" else "_" for letter in plan.cell.name)
        return (self._directory / "traces" / f"{name[:80]}-{plan.cell.digest[:8]}.json.gz").resolve()

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


def _shared_overrides(plan: CellPlan, other: CellPlan) -> int:
    return sum(other.cell.overrides.get(path) == value for path, value in plan.cell.overrides.items())
