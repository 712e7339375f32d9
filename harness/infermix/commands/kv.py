"""`infermix kv MODEL`: what the KV cache takes in every layout, and how many sequences fit this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infermix.commands.arguments import add_model_arguments, context_tokens, parse_options, rate
from infermix.cost.kv import layer_states, stored_groups
from infermix.cost.kv_capacity import kv_room, sequences_that_fit
from infermix.cost.machine import machine_facts
from infermix.cost.memory import predict_memory
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import locate_model
from infermix.errors import InfermixError, UserError
from infermix.plugins import Catalogue, load_catalogue
from infermix.report.render import MISSING, size
from infermix.roles.component import Component, Registered, Role, meets
from infermix.roles.facts import MachineFacts, ModelFacts
from infermix.roles.kv_space import KVBudget, KVLayout
from infermix.spec.experiment import ModelSource
from infermix.spec.validate import Report, check_struct

if TYPE_CHECKING:
    from rich.table import Table

HELP = (
    "Bytes of the KV cache in every registered layout, and how many sequences fit this machine beside the weights, "
    "from the code that sizes the allocation. Nothing is loaded."
)
#: Needs that the machine or the model meets or does not; the others are up to the rest of a mix.
_JUDGED = ("device", "sm", "dtype", "model")


@dataclass(frozen=True)
class Row:
    """One layout. Bytes are those that it allocates: for a token more, for a sequence more, for the whole batch.

    `sequences_that_fit` is `None` where memory does not bound them. `reason` says why a layout does not suit the
    model or the machine; the other figures are `None` then.
    """

    layout: str
    lossless: bool | None = None
    bytes_per_token: float | None = None
    bytes_per_sequence: int | None = None
    batch_bytes: int | None = None
    sequences_that_fit: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class _Question:
    """`room_bytes`: what the machine's memory leaves for the KV beside weights and activations."""

    facts: ModelFacts
    machine: MachineFacts
    context: int
    batch: int
    room_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="NAME[:OPTION=VALUE,...]",
        help="layouts to compare, with their options (every registered one with its defaults)",
    )
    parser.add_argument(
        "--kv-memory-fraction", type=_fraction, help="share of the memory for weights, activations and KV together"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def execute(args: argparse.Namespace) -> int:
    source = locate_model(ModelSource(source=args.model), Path.cwd())
    facts = read_model_facts(source, dtype=args.dtype, dummy=source.kind == "dummy")
    question = _question(args, facts)
    rows = [_row(label, registered, options, question) for label, registered, options in _chosen(args.layouts)]
    if args.json:
        print(json.dumps({**_setting(question), "layouts": [asdict(row) for row in rows]}, indent=2))
    else:
        _show(question, rows)
    return 0


def _fraction(text: str) -> float:
    value = rate(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share between 0 and 1")
    return value


def _question(args: argparse.Namespace, facts: ModelFacts) -> _Question:
    machine = machine_facts(args.device)
    if args.memory_gb:
        machine = replace(machine, memory_bytes=round(args.memory_gb * 1e9))
    others = predict_memory(facts, None, device=machine.device, max_num_seqs=args.batch)
    room = kv_room(machine, others, None, args.kv_memory_fraction)
    return _Question(facts, machine, context_tokens(args, facts), args.batch, room)


def _chosen(texts: Iterable[str]) -> Iterator[tuple[str, Registered, Any]]:
    """Label, component and options of every layout asked for; options are `None` where defaults are not enough."""
    catalogue = load_catalogue()
    if not texts:
        for registered in catalogue.all(Role.KV):
            yield registered.component.name, registered, _defaults(registered.component)
    for text in texts:
        yield text, *_parse_layout(text, catalogue)


def _defaults(component: Component) -> Any:
    try:
        return component.options()
    except TypeError:  # an option without a default
        return None


def _parse_layout(text: str, catalogue: Catalogue) -> tuple[Registered, Any]:
    name, _, options = text.partition(":")
    registered = catalogue.find(Role.KV, name)
    report = Report()
    checked = check_struct(parse_options(options, "--layouts"), registered.component.options, ("kv", name), report)
    report.raise_any()
    return registered, checked


def _row(label: str, registered: Registered, options: Any, question: _Question) -> Row:
    component = registered.component
    if options is None:
        return Row(label, reason=f"has options without a default: give them as {label}:OPTION=VALUE")
    reason = registered.unavailable or _unmet(component, options, question)
    if reason:
        return Row(label, component.lossless(options), reason=reason)
    try:
        return _measured(label, component.lossless(options), component.build(options, None), question)
    except InfermixError as error:
        reason = str(UserError(error.message, hint=error.hint)) if isinstance(error, UserError) else str(error)
        return Row(label, component.lossless(options), reason=reason)


def _unmet(component: Component, options: Any, question: _Question) -> str | None:
    facts, machine = question.facts, question.machine
    provided = machine.provides | facts.features | {f"dtype:{facts.dtype}"}
    needs = component.needs(options, facts, machine)
    unmet = [need for need in sorted(needs) if need.partition(":")[0] in _JUDGED and not meets(need, provided)]
    if unmet:
        return f"needs {', '.join(unmet)}"
    offered = component.provides(options, facts, machine)
    asked = [name for name in sorted(facts.features) if name.startswith("kv:") and not meets(name, offered)]
    return f"does not provide {', '.join(asked)}, which this model needs" if asked else None


def _measured(label: str, lossless: bool, layout: KVLayout, question: _Question) -> Row:
    facts = question.facts
    groups = stored_groups(facts, layout)
    budget = KVBudget(1, question.context, facts.dtype_bytes, states=layer_states(facts))

    def shape(count: int) -> Any:
        return layout.shape(groups, replace(budget, max_num_seqs=count))

    batch = shape(question.batch)
    return Row(
        layout=label,
        lossless=lossless,
        bytes_per_token=batch.bytes_per_token,
        bytes_per_sequence=shape(2).bytes - shape(1).bytes,
        batch_bytes=batch.bytes,
        sequences_that_fit=sequences_that_fit(layout, groups, budget, question.room_bytes),
    )


def _setting(question: _Question) -> dict[str, Any]:
    return {
        "model": question.facts.source,
        "dtype": question.facts.dtype,
        "context": question.context,
        "batch": question.batch,
        "machine": question.machine.name,
        "memory_bytes": question.machine.memory_bytes,
        "kv_room_bytes": question.room_bytes,
    }


def _show(question: _Question, rows: list[Row]) -> None:
    from infermix.report.terminal import terminal_console

    console = terminal_console()
    facts, machine = question.facts, question.machine
    console.print(f"[bold]{facts.source}[/]  {facts.model_type}, {facts.num_layers} layers, {facts.dtype}")
    console.print(
        f"{machine.name}: {size(machine.memory_bytes)}, of which {size(question.room_bytes)} for KV beside "
        f"{size(facts.weight_bytes)} of weights"
    )
    console.print(_table(question, rows))
    for row in rows:
        if row.reason:
            console.print(f"{row.layout}: {row.reason}", markup=False, highlight=False)


def _table(question: _Question, rows: list[Row]) -> Table:
    from rich.table import Table

    table = Table(title=f"sequences of {question.context:,} tokens", title_justify="left")
    table.add_column("layout")
    table.add_column("kind")
    for title in ("bytes per token", "per sequence", f"batch of {question.batch}", "sequences that fit"):
        table.add_column(title, justify="right")
    for row in rows:
        if row.reason is None:
            table.add_row(row.layout, _kind(row), *_figures(row))
        else:
            table.add_row(row.layout, _kind(row), *[MISSING] * 4)
    return table


def _kind(row: Row) -> str:
    if row.lossless is None:
        return MISSING
    return "lossless" if row.lossless else "lossy"


def _figures(row: Row) -> tuple[str, ...]:
    assert row.bytes_per_token is not None
    assert row.bytes_per_sequence is not None
    assert row.batch_bytes is not None
    fitting = "any number" if row.sequences_that_fit is None else f"{row.sequences_that_fit:,}"
    return f"{row.bytes_per_token:,.0f}", size(row.bytes_per_sequence), size(row.batch_bytes), fitting
