"""`infermix cost MODEL`: parameters, bytes and FLOPs per phase and layer kind, intensity, ideal time, what fits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infermix.commands.arguments import add_model_arguments, context_tokens, parse_options, rate
from infermix.cost.estimate import Estimate, Setting, estimate
from infermix.cost.kv import kv_bytes_per_token, kv_groups, layer_states, stored_groups
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.roofline import PhaseCost
from infermix.cost.source import locate_model
from infermix.errors import UserError, nearest
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.facts import MachineFacts, ModelFacts
from infermix.roles.kv_space import KVBudget
from infermix.spec.experiment import ModelSource
from infermix.spec.validate import Report, check_struct

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HELP = "Parameters, bytes and FLOPs of a model per phase and layer kind, its KV, ideal step time, and what fits."

#: Roles whose choice changes what a step moves or computes.
_ROLES = (Role.KV, Role.QUANTIZER)


@dataclass(frozen=True)
class _Parts:
    """What the chosen parts change."""

    weight_bits: float | None = None
    kv_element_bytes: float | None = None
    cached: bool = True
    kv_seq_bytes: float | None = None
    kv_batch_bytes: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--parts",
        nargs="+",
        default=[],
        metavar="ROLE=NAME[:OPTION=VALUE,...]",
        help="quantizer and KV layout, e.g. quantizer=rtn:bits=4,group_size=64 kv=paged",
    )
    parser.add_argument("--copy-gbs", type=rate, help="GB/s of a copy instead of this machine's measured rate")
    parser.add_argument("--tflops", type=rate, help="TFLOP/s of a matmul instead of this machine's measured rate")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def execute(args: argparse.Namespace) -> int:
    source = locate_model(ModelSource(source=args.model), Path.cwd())
    facts = read_model_facts(source, dtype=args.dtype, dummy=source.kind == "dummy")
    machine = machine_facts(args.device)
    setting = _setting(args, context_tokens(args, facts), facts, machine)
    result = estimate(facts, _with_parts(setting, args.parts, facts))
    if args.json:
        print(json.dumps({"machine": machine.name, **result.to_dict()}, indent=2))
    else:
        _show(result, machine)
    return 0


def _setting(args: argparse.Namespace, context: int, facts: ModelFacts, machine: MachineFacts) -> Setting:
    measured = machine.ceilings
    return Setting(
        context=context,
        batch=args.batch,
        bytes_per_s=args.copy_gbs * 1e9 if args.copy_gbs else measured.copy_bytes_per_s,
        flops_per_s=args.tflops * 1e12 if args.tflops else measured.matmul_flops_per_s.get(facts.dtype),
        memory_bytes=round(args.memory_gb * 1e9) if args.memory_gb else machine.memory_bytes,
        device=machine.device,
    )


def _with_parts(setting: Setting, texts: Iterable[str], facts: ModelFacts) -> Setting:
    parts = _Parts()
    chosen = [_parse_part(text) for text in texts]
    catalogue = load_catalogue() if chosen else None
    for role, name, options in chosen:
        assert catalogue is not None
        component = catalogue.find(role, name).component
        report = Report()
        checked = check_struct(options, component.options, ("parts", role.value), report)
        report.raise_any()
        if role is Role.QUANTIZER:
            parts = replace(parts, weight_bits=component.weight_bits(checked))
        else:
            parts = _with_layout(parts, component.build(checked, None), setting, facts)
    return replace(setting, **vars(parts))


def _with_layout(parts: _Parts, layout: Any, setting: Setting, facts: ModelFacts) -> _Parts:
    """What the layout stores per value, scales included, what it allocates, and whether it stores anything."""
    budget = KVBudget(setting.batch, setting.context, facts.dtype_bytes, states=layer_states(facts))
    shape = layout.shape(stored_groups(facts, layout), budget)
    if layout.space(shape).recompute:
        return replace(parts, cached=False)
    values = kv_bytes_per_token(facts, 1.0)
    return replace(
        parts,
        kv_element_bytes=shape.bytes_per_token / values if values else None,
        kv_seq_bytes=shape.bytes_of_sequence(setting.context),
        kv_batch_bytes=shape.bytes,
    )


def _parse_part(text: str) -> tuple[Role, str, dict[str, Any]]:
    role, equals, rest = text.partition("=")
    names = [each.value for each in _ROLES]
    if not equals or role not in names:
        raise UserError(f"{text!r} is no part that changes the cost", where="--parts", hint=nearest(role, names))
    name, _, options = rest.partition(":")
    return Role(role), name, parse_options(options, "--parts")


def _show(result: Estimate, machine: MachineFacts) -> None:
    from infermix.report.terminal import terminal_console

    console = terminal_console()
    _show_model(console, result)
    for phase in result.phases:
        console.print(_phase_table(result, phase))
        console.print(_phase_line(result, phase))
    _show_limits(console, result, machine)
    _show_memory(console, result)


def _show_model(console: Console, result: Estimate) -> None:
    facts = result.facts
    console.print(f"[bold]{facts.source}[/]  {facts.model_type}, {facts.num_layers} layers, {facts.dtype}")
    counts = ", ".join(f"{kind} {_count(number)}" for kind, number in result.parameters.items() if number)
    console.print(f"parameters  {facts.num_parameters:,}  ({counts})")
    console.print(f"weights     {_bytes(result.weight_bytes)}  ({result.bits_per_weight:g} bits in the linears)")
    groups = kv_groups(facts)
    windows = ", ".join(f"{len(g.layers)} layers {f'window {g.window}' if g.window else 'full'}" for g in groups)
    console.print(
        f"KV          {_bytes(result.kv_bytes_per_token)} per token, "
        f"{_bytes(result.kv_bytes_per_seq)} per sequence of {result.setting.context} tokens  ({windows})"
    )
    for text in filter(None, (facts.refusal and f"the native engine refuses it: {facts.refusal}", *facts.notes)):
        console.print(f"note        {text}", highlight=False, markup=False)


def _phase_table(result: Estimate, phase: PhaseCost) -> Table:
    from rich.table import Table

    batch = result.setting.batch if phase.name == "decode" else 1
    title = f"{phase.name}: {phase.num_tokens} new tokens, {batch} x context {result.setting.context}"
    table = Table(title=title, title_justify="left")
    table.add_column("layer kind")
    for name in ("GFLOP", "weights", "KV", "FLOP/B"):
        table.add_column(name, justify="right")
    for kind in phase.kinds:
        if kind.num_bytes or kind.flops:
            intensity = f"{kind.flops / kind.num_bytes:.2f}" if kind.num_bytes else "-"
            cells = (f"{kind.flops / 1e9:,.3f}", _bytes(kind.weight_bytes), _bytes(kind.kv_bytes), intensity)
            table.add_row(kind.kind, *cells)
    table.add_section()
    total = (
        f"{phase.flops / 1e9:,.3f}",
        _bytes(phase.weight_bytes),
        _bytes(phase.kv_bytes),
        f"{phase.intensity:.2f}",
    )
    table.add_row("all", *total)
    return table


def _phase_line(result: Estimate, phase: PhaseCost) -> str:
    step = result.ideal.get(phase.name)
    if step is None:
        return ""
    produced = phase.num_tokens if phase.name == "prefill" else result.setting.batch
    return (
        f"at best {_seconds(step.seconds)} ({produced / step.seconds:,.1f} tokens/s), bound by {step.binds}: "
        f"bytes {_seconds(step.bytes_s)}, FLOPs {_seconds(step.flops_s)}\n"
    )


def _show_limits(console: Console, result: Estimate, machine: MachineFacts) -> None:
    setting = result.setting
    if result.ridge is None or setting.bytes_per_s is None or setting.flops_per_s is None:
        console.print(
            f"no ideal times: {machine.name} has no measured ceilings for {result.facts.dtype}; "
            "run `infermix doctor --measure`, or give --copy-gbs and --tflops"
        )
        return
    console.print(
        f"ceilings    {setting.bytes_per_s / 1e9:,.1f} GB/s, {setting.flops_per_s / 1e12:,.2f} TFLOP/s "
        f"in {result.facts.dtype}; ridge {result.ridge:.1f} FLOP/B, reached by {result.ridge_rows:.0f} rows"
    )


def _show_memory(console: Console, result: Estimate) -> None:
    memory, setting = result.memory, result.setting
    listing = (
        f"weights {_bytes(memory.weights_bytes)}, KV {_bytes(memory.kv_bytes)}, "
        f"activations {_bytes(memory.activation_bytes)}, process {_bytes(memory.overhead_bytes)}"
    )
    console.print(f"memory      {_bytes(memory.total_bytes)} for {setting.batch} sequences  ({listing})")
    if setting.memory_bytes is None:
        return
    verdict = "fits" if result.fits else "does not fit"
    more = "" if result.sequences_that_fit is None else f"; {result.sequences_that_fit} such sequences fit"
    console.print(f"            {verdict} {_bytes(setting.memory_bytes)}{more}")


def _bytes(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:.0f} B" if size else "-"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def _count(number: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)
