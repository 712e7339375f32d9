"""The verbs of the command line as Python functions: `infermix.plan`, `infermix.run`, `infermix.leaderboard`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infermix.compose import CellPlan, compose
from infermix.extra_plugins import load_extra_plugins
from infermix.plugins import load_catalogue
from infermix.spec.load import load_experiment

if TYPE_CHECKING:
    from infermix.progress import SweepProgress
    from infermix.record.record import Record


def plan(
    path: Path | str, *, sets: Sequence[str] = (), only: str | None = None, extra_plugins: Sequence[str] = ()
) -> list[CellPlan]:
    """Every cell of an experiment with its verdict and predictions; nothing is run. Raises `UserError`."""
    catalogue = load_catalogue(load_extra_plugins(extra_plugins))
    return compose(load_experiment(path, sets).only(only), catalogue)


def run(
    path: Path | str,
    *,
    out: Path | str | None = None,
    sets: Sequence[str] = (),
    only: str | None = None,
    fresh: bool = False,
    profile: bool = False,
    ceilings: bool = True,
    extra_plugins: Sequence[str] = (),
    progress: SweepProgress | None = None,
    ray: str | None = None,
) -> list[Record]:
    """Run or resume an experiment; returns the record of every cell, those kept from earlier runs included.

    Records are written to `out` (default `results/<experiment name>`). Raises `UserError` for bad input; a cell that
    fails is a record with its state and reason, never an exception. `ray` is the address of a Ray cluster
    (`auto`, `HOST:PORT`) whose nodes run the cells; they need this package and the experiment's folder.
    """
    from infermix.progress import Silent
    from infermix.sweep import RunOptions, run_experiment

    options = RunOptions(
        only=only,
        fresh=fresh,
        profile=profile,
        ceilings=ceilings,
        extra_plugins=tuple(extra_plugins),
        progress=progress or Silent(),
    )
    if ray is None:
        return run_experiment(path, out, sets=sets, options=options)
    from infermix.spread import SpreadSweep

    make = functools.partial(SpreadSweep, address=ray)
    return run_experiment(path, out, sets=sets, options=options, sweep=make)


def leaderboard(directory: Path | str, *, out: Path | str | None = None) -> list[Path]:
    """Write the leaderboard of the records below `directory` into `out` (default: there); returns its files."""
    from infermix.record.record import Summary
    from infermix.record.store import scan_records
    from infermix.report.leaderboard import leaderboard as write

    scan = scan_records(Path(directory), Summary)
    return write(scan.records, Path(directory if out is None else out), scan.publishable_warnings)
