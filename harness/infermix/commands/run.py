"""`infermix run`: run or resume an experiment, print its table, write its leaderboard."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from infermix.progress import Bars, Lines, SweepProgress

if TYPE_CHECKING:
    from rich.console import Console

    from infermix.record.record import Record

HELP = "run or resume an experiment"

_INTERRUPTED = 130
_ROWS = 30

EPILOG = """Cells that have a result from this machine are kept. A cell runs again when its last record is wrong,
error, oom or timeout, or when infermix, torch, transformers or the package of one of its parts has a new version.
Edited code without a new version is not noticed: --fresh runs everything again. The first line says what is kept,
and why cells run again. Exit status: 0 when cells ran well, 1 when a cell ended in error or wrong or none ended well,
2 for bad input, 130 after Ctrl-C; finished cells are kept and the next run resumes"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("file", type=Path, help="experiment (YAML)")
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="a.b=VALUE", help="override one value"
    )
    parser.add_argument("--only", metavar="GLOB", help="run the cells whose name matches")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="run every cell again, also where its result would be kept (after editing code)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the records (default: results/NAME)")
    parser.add_argument(
        "--profile", action="store_true", help="write a torch trace of one extra repeat per cell to DIR/traces"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="spread the cells over a Ray cluster (auto, or HOST:PORT); a lost node's cells run elsewhere",
    )
    parser.add_argument(
        "--no-ceilings", action="store_true", help="do not measure this machine's limits where they are not stored"
    )


def execute(args: Namespace) -> int:
    """Raises `UserError` for bad input."""
    from rich.console import Console

    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        records = _run(args, _progress(console))
    except KeyboardInterrupt:
        console.print("interrupted: finished cells are kept; the same command resumes", markup=False)
        return _INTERRUPTED
    _publish(_directory(args, records))
    return exit_status(records)


def exit_status(records: Sequence[Record]) -> int:
    """Cells that are refused, too large or too slow are findings; errors and wrong results are failures."""
    states = {record.state for record in records}
    return 1 if states & {"error", "wrong"} or "ok" not in states else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _progress(console: Console) -> SweepProgress:
    if console.is_terminal:
        return Bars(console)
    return Lines(lambda line: print(line, file=sys.stderr, flush=True))


def _run(args: Namespace, progress: SweepProgress) -> list[Record]:
    from infermix.api import run

    return run(
        args.file,
        out=args.out,
        sets=args.sets,
        only=args.only,
        fresh=args.fresh,
        profile=args.profile,
        ceilings=not args.no_ceilings,
        progress=progress,
        ray=args.ray,
    )


def _directory(args: Namespace, records: Sequence[Record]) -> Path:
    return args.out or Path("results") / records[0].experiment_name


def _publish(directory: Path) -> None:
    """The tables and files of everything in the folder, this run included."""
    from infermix.commands import leaderboard

    leaderboard.execute(Namespace(directory=directory, out=None, rows=_ROWS))
