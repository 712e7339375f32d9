"""A sweep over many machines: every cell is a Ray task, every record comes back to one store.

A task runs its cell as `infermix run` does on one machine, in a process of its own, and returns the record. When a
node or its worker is lost, Ray runs the task again elsewhere; a record is written here once, when it has come back.
"""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from infermix.errors import UserError
from infermix.record.record import Record
from infermix.resume import Earlier, Found
from infermix.spec.experiment import Cell
from infermix.sweep import RunOptions, Sweep, run_experiment

if TYPE_CHECKING:
    from infermix.compose import CellPlan

#: How often a cell whose node was lost is started again.
MOST_RETRIES = 10


class Task(msgspec.Struct, kw_only=True):
    """What a node needs to run one cell. `baseline` is the JSON of the record that its gates compare with."""

    cell: Cell
    extra_plugins: tuple[str, ...] = ()
    ceilings: bool = True
    baseline: bytes = b""


@dataclass(frozen=True)
class Needs:
    """Ray resources of a cell: what it would use of one machine."""

    num_cpus: float
    num_gpus: float


def needs_of(plan: CellPlan) -> Needs:
    """One GPU for a cell on CUDA; as many cores as its threads (one where the experiment does not say).

    `device: auto` is what it is on the machine that asks.
    """
    experiment = plan.cell.experiment
    device = plan.device if experiment.device == "auto" else experiment.device
    return Needs(float(experiment.limits.num_threads or 1), 1.0 if device.startswith("cuda") else 0.0)


def run_task(data: bytes) -> bytes:
    """On a node: run the cell in a folder of its own; returns its record as JSON."""
    from infermix.record.store import write_atomically

    task = msgspec.json.decode(data, type=Task)
    with tempfile.TemporaryDirectory(prefix="infermix-") as folder:
        if task.baseline:
            write_atomically(Path(folder) / "baseline.json", task.baseline)
        options = RunOptions(ceilings=task.ceilings, extra_plugins=task.extra_plugins)
        (record,) = run_experiment([task.cell], folder, options=options)
    return msgspec.json.encode(record)


class EarlierAnywhere(Earlier):
    """Results count whichever machine they come from."""

    def find(self, plan: CellPlan) -> Found | None:
        found = [entry for (digest, _), entry in self._latest.items() if digest == plan.cell.digest]
        if not found:
            return None
        record, path = max(found, key=lambda entry: entry[0].created)
        return Found(path, self._again(record, plan))


class SpreadSweep(Sweep):
    """A sweep whose cells run wherever Ray has room for them; baselines first, because gates need them.

    Cells are composed again on the node that runs them: its machine decides what runs there, and its environment is
    what the record tells.
    """

    def __init__(self, plans: Sequence[CellPlan], directory: Path, options: RunOptions, address: str) -> None:
        # Whether a cell runs is up to the node: a head without a GPU says nothing about the others.
        super().__init__([replace(plan, runs=True, reasons=()) for plan in plans], directory, options)
        self._address, self._earlier = address, EarlierAnywhere(directory)
        if options.profile:
            raise UserError("traces stay on the node that runs a cell", where="--profile", hint="leave out --ray")
        if any(plan.cell.experiment.measure.interleave for plan in plans):
            raise UserError(
                "cells that take turns with their baseline must share a machine",
                key="measure.interleave",
                hint="leave out --ray, or interleave",
            )

    def _with_ceilings(self, plans: Sequence[CellPlan]) -> list[CellPlan]:
        return list(plans)  # each node measures its own

    def _run_all(self, plans: Sequence[CellPlan]) -> None:
        ray = connect(self._address)
        try:
            for first in (True, False):
                batch = [plan for plan in plans if plan.cell.baseline is first]
                for record in self._finished(ray, batch):
                    self._keep(record)
                    self._progress.done(record)
        finally:
            ray.shutdown()

    def _finished(self, ray: Any, plans: Sequence[CellPlan]) -> Iterator[Record]:
        """Records in the order in which they come back. A cell that Ray gives up on is a record with state error."""
        remote = ray.remote(max_retries=MOST_RETRIES)(run_task)
        open_: dict[Any, CellPlan] = {}
        for plan in plans:
            needs = needs_of(plan)
            placed = remote.options(num_cpus=needs.num_cpus, num_gpus=needs.num_gpus, name=plan.cell.name)
            open_[placed.remote(msgspec.json.encode(self._task(plan)))] = plan
            self._progress.cell(plan.cell.name)
        while open_:
            (ready, *_), _ = ray.wait(list(open_), num_returns=1)
            plan = open_.pop(ready)
            try:
                record = msgspec.json.decode(ray.get(ready), type=Record)
            except ray.exceptions.RayError as error:
                record = self._lost(plan, str(error))
            yield record

    def _task(self, plan: CellPlan) -> Task:
        judged_by = self._judged_by(plan, self._baseline_of(plan))
        return Task(
            cell=plan.cell,
            extra_plugins=self._options.extra_plugins,
            ceilings=self._options.ceilings,
            baseline=b"" if judged_by is None else msgspec.json.encode(judged_by),
        )

    def _lost(self, plan: CellPlan, why: str) -> Record:
        from infermix.cell.assemble import planned_record

        record = planned_record(plan, self._environment(plan))
        lines = why.strip().splitlines() or ["no reason given"]
        record.state, record.reason, record.complete = "error", f"Ray: {lines[-1]}", True
        record.log = lines
        return record


def connect(address: str) -> Any:
    """Ray, connected. Raises `UserError` when it is not installed or nobody answers."""
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed", where="--ray", hint="pip install 'infermix[ray]'") from None
    _refuse_silence(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"no Ray cluster at {address!r}: {error}", where="--ray", hint="ray start --head") from error
    return ray


def _refuse_silence(address: str) -> None:
    """Raises `UserError` at once where Ray would try for a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise UserError(f"no Ray cluster at {address!r}: {error}", where="--ray", hint="ray start --head") from None
