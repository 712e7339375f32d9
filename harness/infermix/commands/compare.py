"""`infermix compare A B [--metric M ...] [--fail-if EXPR ...] [--force]`.

Exit codes: 0 nothing fired; 1 a `--fail-if` fired; 2 bad input; 3 the two sides are not comparable (other
model, workload or machine, or no cell in common) and `--force` was not given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from infermix.errors import UserError, nearest
from infermix.record.track import track_title
from infermix.report.cells import Pair, Sides, load_side, match
from infermix.report.compare import Difference, compare, known_metrics
from infermix.report.limits import FailIf, parse_fail_if
from infermix.report.terminal import difference_table, terminal_console

HELP = "differences between two records or groups of records, with their noise"
FINE, FIRED, BAD_INPUT, NOT_COMPARABLE = 0, 1, 2, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("a", metavar="A", help="a record, a directory or a quoted glob: what B is compared with")
    parser.add_argument("b", metavar="B", help="the same for the other side")
    parser.add_argument("--metric", action="append", default=[], help="compare this metric only (repeatable)")
    parser.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="EXPR",
        help='exit 1 when a significant difference is beyond a limit, e.g. "output_tokens_per_s<-5%%" (repeatable); '
        "also when B lacks a cell that A has, or did not run it to the end",
    )
    parser.add_argument("--force", action="store_true", help="compare also across models, workloads or machines")


def execute(args: argparse.Namespace) -> int:
    console, stderr = terminal_console(), Console(stderr=True)
    try:
        rules = [parse_fail_if(text) for text in args.fail_if]
        sides = _load(args.a, args.b, stderr)
        _check_rules(rules, sides)
        refusal = None if args.force else _refusal(sides)
        if refusal:
            stderr.print(Text(f"not comparable: {refusal}; --force compares anyway", style="red"), soft_wrap=True)
            return NOT_COMPARABLE
        fired = _report(sides, args.metric, rules, console)
    except UserError as error:
        stderr.print(Text(f"error: {error}", style="red"), soft_wrap=True)
        return BAD_INPUT
    for message in fired:
        stderr.print(Text(f"failed: {message}", style="bold red"), soft_wrap=True)
    return FIRED if fired else FINE


def _load(a: str, b: str, stderr: Console) -> Sides:
    left, first = load_side(a)
    right, second = load_side(b)
    for warning in (*first, *second):
        stderr.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    return match(left, right)


def _check_rules(rules: Sequence[FailIf], sides: Sides) -> None:
    known = known_metrics(record for pair in sides.pairs for record in (*pair.a, *pair.b))
    for rule in rules:
        if rule.metric not in known:
            raise UserError(
                f"no record has the metric {rule.metric!r}", where="--fail-if", hint=nearest(rule.metric, known)
            )


def _refusal(sides: Sides) -> str | None:
    if not sides.pairs:
        return "the two sides have no cell in common"
    for pair in sides.pairs:
        if not pair.comparable:
            return f"{pair.name}: {track_title(pair.a[-1])} against {track_title(pair.b[-1])}"
    return None


def _report(sides: Sides, metrics: Sequence[str], rules: Sequence[FailIf], console: Console) -> list[str]:
    """Print every pair; returns one message per reason to fail."""
    wanted = list(dict.fromkeys([*metrics, *(rule.metric for rule in rules)])) if metrics else []
    fired: list[str] = []
    claims = 0
    for pair in sides.pairs:
        differences, problem = _differences(pair, wanted, rules)
        claims += sum(each.has_interval for each in differences)
        if problem:
            console.print(Text(problem, style="yellow"), soft_wrap=True)
            fired += [problem] if rules else []
            continue
        console.print(difference_table(differences, pair.name))
        fired += _fired(pair, differences, rules)
    for name in sides.only_a:
        console.print(Text(f"only in A: {name}", style="yellow"), soft_wrap=True)
        fired += [f"{name}: B has no such cell"] if rules else []
    for name in sides.only_b:
        console.print(Text(f"only in B: {name}", style="yellow"), soft_wrap=True)
    console.print(
        Text(f"{claims} intervals at 95 %: about {claims * 0.05:.1f} exclude zero by chance alone", style="dim")
    )
    return fired


def _differences(pair: Pair, wanted: Sequence[str], rules: Sequence[FailIf]) -> tuple[list[Difference], str | None]:
    """Differences of the `ok` runs, or why there are none."""
    a = [record for record in pair.a if record.state == "ok"]
    b = [record for record in pair.b if record.state == "ok"]
    for label, runs, good in (("A", pair.a, a), ("B", pair.b, b)):
        if not good:
            return [], f"{pair.name}: {label} is {runs[-1].state}: {runs[-1].reason}"
    found = compare(a, b, wanted)
    present = {each.metric for each in found}
    extra = [rule.metric for rule in rules if rule.metric not in present]
    return found + (compare(a, b, dict.fromkeys(extra)) if extra else []), None


def _fired(pair: Pair, differences: Sequence[Difference], rules: Sequence[FailIf]) -> list[str]:
    by_name = {each.metric: each for each in differences}
    messages = []
    for rule in rules:
        found = by_name.get(rule.metric)
        if found is None:
            messages.append(f"{pair.name}: {rule.metric} is missing on one side")
        elif rule.fires(found):
            messages.append(f"{pair.name}: {rule.text} holds ({found.relative * 100:+.1f} %)")
    return messages
