"""`infermix show RECORD`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from infermix.measure.goodput import e2e_s, gaps_s, tpot_s, ttft_s
from infermix.record.record import GuardResult, PartRecord, Record
from infermix.record.store import read_record
from infermix.record.track import track_title
from infermix.report import render
from infermix.report.labels import with_options
from infermix.report.terminal import fields_table, flat, metric_row, terminal_console

HELP = "one record: parts, environment, guards, log, first outputs, latencies"
MAX_OUTPUTS = 3
MAX_LOG_LINES = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", type=Path, metavar="RECORD", help="a record's JSON file")
    parser.add_argument("--full", action="store_true", help="every output and every line of the log")


def execute(args: argparse.Namespace) -> int:
    """Raises `UserError` for a record that cannot be read."""
    record = read_record(args.record)
    console = terminal_console()
    for block in describe(record, full=args.full):
        console.print(block)
    return 0


def describe(record: Record, full: bool = False) -> Iterator[RenderableType]:
    """The blocks that `show` prints, in order; blocks without content are left out."""
    yield _head(record)
    yield render.text_table(["role", "asked for", "from", "executed"], _parts(record), "Parts")
    if record.metrics:
        rows = [metric_row(name, metric) for name, metric in record.metrics.items()]
        yield render.text_table(["metric", "value", "95 % interval", "repeats"], rows, "Metrics", right=(1, 2, 3))
    yield from _latencies(record)
    if record.quality:
        quality = [
            [name, render.number(found.value), "" if found.stderr is None else render.number(found.stderr, 2)]
            for name, found in record.quality.items()
        ]
        yield render.text_table(["quality", "value", "standard error"], quality, "Quality", right=(1, 2))
    if record.guards:
        yield render.text_table(["guard", "verdict", "detail"], map(_guard, record.guards), "Guards")
    for title, fields in _field_blocks(record):
        if fields:
            yield fields_table(fields, title)
    yield from _texts(record, full)


def _head(record: Record) -> Text:
    text = Text(f"{record.experiment_name}: {record.cell}\n", style="bold")
    text.append(f"{track_title(record)}\n", style="not bold")
    text.append(f"run {record.run_id} of {record.created}, cell {record.cell_digest[:16]}, track {record.track}\n")
    text.append(f"{record.state}", style="green" if record.state == "ok" else "bold red")
    if record.state == "ok":
        text.append(f", {record.verdict}", style=render.VERDICT_STYLE[record.verdict])
    text.append(f" {record.reason}" if record.reason else "")
    text.append("" if record.complete else " (unfinished)", style="yellow")
    return text


def _parts(record: Record) -> Iterator[list[str]]:
    chosen = {**({"engine": record.engine} if record.engine else {}), **record.parts}
    for role, part in chosen.items():
        yield [role, _asked(part), f"{part.distribution} {part.version}".strip(), _executed(part)]
    for part in record.transforms:
        yield ["transform", _asked(part), f"{part.distribution} {part.version}".strip(), _executed(part)]


def _asked(part: PartRecord) -> str:
    return with_options(part.name, part.options) + ("" if part.lossless else " (lossy)")


def _executed(part: PartRecord) -> str:
    adapters = [f"{feature} via {adapter}" for feature, adapter in part.via.items()]
    return "\n".join([*adapters, *(f"{name}: {value}" for name, value in flat(part.executed))])


def _guard(guard: GuardResult) -> list[str | Text]:
    return [guard.name, Text(guard.verdict, style=render.VERDICT_STYLE[guard.verdict]), guard.detail]


def _latencies(record: Record) -> Iterator[RenderableType]:
    """One histogram per kind of latency, over all requests of all repeats."""
    samples = [sample for repeat in record.repeats for sample in repeat.requests]
    kinds = {
        "TTFT": [value for sample in samples if (value := ttft_s(sample)) is not None],
        "TPOT": [value for sample in samples if (value := tpot_s(sample)) is not None],
        "ITL": [gap for each in record.repeats if not each.gaps for s in each.requests for gap in gaps_s(s)],
        "E2E": [value for sample in samples if (value := e2e_s(sample)) is not None],
    }
    for name, values in kinds.items():
        if values:
            lines = render.histogram(values, render.seconds)
            yield Text("\n".join([f"{name}, {len(values)} values", *lines, ""]))


def _field_blocks(record: Record) -> list[tuple[str, dict]]:
    return [
        ("Memory", dict(record.memory)),
        ("Roofline", record.roofline),
        ("Self-check", record.self_check),
        ("Phases", {f"{name}_s": value for name, value in record.phases_s.items()}),
        ("Counters", dict(record.counters)),
        (
            "Paired with the baseline",
            {key: record.paired[key] for key in sorted(record.paired) if key != "baseline_samples"},
        ),
        ("Environment", record.environment),
    ]


def _texts(record: Record, full: bool) -> Iterator[RenderableType]:
    outputs = record.outputs if full else record.outputs[:MAX_OUTPUTS]
    for index, output in enumerate(outputs):
        yield fields_table(output, f"Output {index + 1} of {len(record.outputs)}")
    lines = record.log if full else record.log[-MAX_LOG_LINES:]
    if lines:
        left = f" (last {len(lines)} of {len(record.log)} lines)" if len(lines) < len(record.log) else ""
        yield Text("\n".join([f"Log{left}", *lines]))
