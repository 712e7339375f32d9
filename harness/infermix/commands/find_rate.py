"""`infermix find-rate FILE`: the largest request rate whose goodput stays above a share."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from infermix.errors import InfermixError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infermix.measure.rate_search import RateSearch
    from infermix.spec.experiment import Cell

HELP = "find the largest request rate whose goodput stays above a share"

EPILOG = """The experiment needs measure.goodput (the limits) and open-loop arrivals with a request_rate. Every rate
runs as a cell of its own, with other prompts and arrivals in each repeat, and its record is kept: the same command
resumes. Give it requests enough: an overload needs time to show."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("file", type=Path, help="experiment (YAML)")
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="a.b=VALUE", help="override one value"
    )
    parser.add_argument("--only", metavar="GLOB", help="the cell whose name matches, where there are several")
    parser.add_argument("--share", type=float, default=0.9, help="of requests that meet the limits (default: 0.9)")
    parser.add_argument("--low", type=float, default=1.0, metavar="RATE", help="first rate, requests/s (default: 1)")
    parser.add_argument("--high", type=float, default=1024.0, metavar="RATE", help="highest rate (default: 1024)")
    parser.add_argument("--tolerance", type=float, default=0.05, help="width of the answer (default: 0.05)")
    parser.add_argument("--max-repeats", type=int, default=12, help="most repeats of a rate (default: 12)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the records (default: results/NAME-rate)")


def execute(args: Namespace) -> int:
    """0 when a rate was found, 1 when not even the lowest holds. Raises `UserError` for bad input."""
    from infermix.measure.rate_search import search_rate

    cell = _only_cell(args)
    found = search_rate(
        lambda rate, repeats: _shares(args, cell, rate, repeats),
        share=args.share,
        low=args.low,
        high=args.high,
        tolerance=args.tolerance,
        repeats=cell.experiment.measure.repeats,
        max_repeats=args.max_repeats,
    )
    print(_answer(found, args.share))
    return 0 if found.rate is not None else 1


def _only_cell(args: Namespace) -> Cell:
    from infermix.spec.load import load_experiment
    from infermix.spec.naming import select_cells

    cells = select_cells(load_experiment(args.file, args.sets), args.only)
    if len(cells) != 1:
        names = ", ".join(cell.name for cell in cells[:4])
        raise UserError(f"one cell is needed, these are {len(cells)}: {names}", hint="choose one with --only")
    experiment = cells[0].experiment
    if not experiment.measure.goodput:
        raise UserError("no limits are stated", key="measure.goodput", hint="for example {ttft_s: 1.0, tpot_s: 0.1}")
    arrivals = experiment.workload.options.get("arrivals")
    if not isinstance(arrivals, dict) or "request_rate" not in arrivals:
        raise UserError(
            "a rate can only be searched where arrivals have a request_rate",
            key="workload.arrivals",
            hint="for example {use: poisson, request_rate: 1}",
        )
    return cells[0]


def _shares(args: Namespace, cell: Cell, rate: float, repeats: int) -> Sequence[float]:
    from infermix.api import run
    from infermix.measure.rate_search import goodput_share

    sets = [f"workload.arrivals.request_rate={rate!r}", "workload.vary=true", f"measure.repeats={repeats}"]
    out = args.out or Path("results") / f"{cell.experiment.name}-rate"
    (record,) = run(args.file, out=out, sets=[*args.sets, *sets], only=args.only, ceilings=False)
    if record.state != "ok":
        raise InfermixError(f"at {rate:g} requests/s the cell ended as {record.state}: {record.reason}")
    shares = [goodput_share(repeat, cell.experiment.measure.goodput) for repeat in record.repeats]
    told = ", ".join(f"{share:.3f}" for share in shares)
    print(f"{rate:10.4g} requests/s: goodput share {told}", file=sys.stderr, flush=True)
    return shares


def _answer(found: RateSearch, share: float) -> str:
    if found.rate is None:
        return f"not even {found.fails_at:.4g} requests/s keep {share:.0%} of the requests within the limits"
    doubt = "" if found.certain else f"; not certain: {_doubt(found)}"
    if found.fails_at is None:
        return f"{found.rate:.4g} requests/s, the highest that was allowed, still keep {share:.0%}{doubt}"
    return f"{found.rate:.4g} requests/s keep {share:.0%} within the limits, {found.fails_at:.4g} do not{doubt}"


def _doubt(found: RateSearch) -> str:
    if any(trial.share.low is None for trial in found.ends):
        return "one repeat gives no interval (--max-repeats 2 or more allows one)"
    return "an interval over repeats contains the share"
