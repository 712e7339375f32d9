"""Builds a simulated engine from the chosen parts. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from infermix.cost.calibration_file import StepTimes, read_step_times
from infermix.cost.kv import layer_states, stored_groups
from infermix.cost.kv_capacity import kv_limit
from infermix.cost.memory import predict_memory
from infermix.cost.step_model import Roofline, roofline
from infermix.engine.simulated.components import SimulatedOptions
from infermix.engine.simulated.engine import SimulatedEngine
from infermix.engine.simulated.replica import Replica
from infermix.engine.simulated.step_clock import StepClock
from infermix.engine.simulated.virtual_clock import VirtualClock
from infermix.errors import Unsupported, UserError
from infermix.record.gaps import GapCounter
from infermix.roles.component import PART_ROLES, Choice, Role
from infermix.roles.engine import EngineContext, EngineReport
from infermix.roles.facts import MachineFacts
from infermix.roles.kv_space import KVBudget, KVShape
from infermix.toolkit.routing import make_router


def build_engine(options: SimulatedOptions, context: EngineContext) -> SimulatedEngine:
    """Raises `UserError` when nothing says how long steps take, `Unsupported` for parts that cannot be simulated."""
    _refuse(context)
    fitted = _calibration(options, context)
    layout_choice = context.parts[Role.KV]
    layout = layout_choice.component.build(layout_choice.options, None)
    machine = options.machine(context.machine, context.dtype, context.base or Path("."))
    shape = _size(layout, context, machine)
    ours = _roofline(context, shape, machine)
    if ours is None and fitted is None:
        raise UserError(
            "nothing says how long a step takes: the ceilings of this machine are not measured",
            key="engine.calibration",
            hint="give the file of `infermix calibrate`, or run `infermix doctor --measure`",
        )
    step_clock = StepClock(fitted, ours, efficiency=options.efficiency, overhead_s=options.overhead_s)

    def make_replicas(gaps: GapCounter) -> list[Replica]:
        return [
            Replica(
                _scheduler(context), layout.space(shape), step_clock.seconds, gaps,
                each_token=options.detail == "tokens", jump=options.jump,
            )
            for _ in range(options.replicas)
        ]  # fmt: skip

    return SimulatedEngine(
        report=_report(options, context, fitted, shape),
        make_replicas=make_replicas,
        router=make_router(options.router, options.replicas),
        clock=VirtualClock(),
        step_clock=step_clock,
        max_model_len=context.max_model_len,
    )


def _scheduler(context: EngineContext) -> Any:
    choice = context.parts[Role.SCHEDULER]
    return choice.component.build(choice.options, context.max_num_seqs)


def _refuse(context: EngineContext) -> None:
    decoder = context.parts[Role.DECODER]
    if "decoder:plain" not in decoder.component.provides(decoder.options, context.facts, context.machine):
        raise Unsupported(
            f"only one token of every sequence a step is simulated, not decoder {decoder.component.name!r}"
        )
    if getattr(context.parts[Role.SCHEDULER].options, "preemption", "recompute") == "swap":
        raise Unsupported("the time of swaps is not simulated: use preemption: recompute")


def _calibration(options: SimulatedOptions, context: EngineContext) -> StepTimes | None:
    if options.calibration is None:
        return None
    return read_step_times((context.base or Path(".")) / options.calibration)


def _size(layout: Any, context: EngineContext, machine: MachineFacts) -> KVShape:
    """As the native engine on that machine sizes it."""
    memory = predict_memory(
        context.facts, None, device=machine.device, weight_bits=_weight_bits(context),
        max_num_seqs=context.max_num_seqs,
    )  # fmt: skip
    limit = kv_limit(machine, memory, context.kv_memory_bytes, context.kv_memory_fraction)
    budget = KVBudget(
        max_num_seqs=context.max_num_seqs, max_model_len=context.max_model_len,
        element_bytes=context.facts.dtype_bytes, max_bytes=limit, states=layer_states(context.facts),
    )  # fmt: skip
    shape: KVShape = layout.shape(stored_groups(context.facts, layout), budget)
    return shape


def _weight_bits(context: EngineContext) -> float | None:
    quantizer = context.parts[Role.QUANTIZER]
    return quantizer.component.weight_bits(quantizer.options)


def _roofline(context: EngineContext, shape: KVShape, machine: MachineFacts) -> Roofline | None:
    return roofline(
        context.facts, machine.ceilings, context.dtype,
        weight_bits=_weight_bits(context), kv_bytes_per_token=shape.bytes_per_token or None,
    )  # fmt: skip


def _report(
    options: SimulatedOptions, context: EngineContext, fitted: StepTimes | None, shape: KVShape
) -> EngineReport:
    report = EngineReport(kv_bytes=shape.bytes, kv_bytes_per_token=shape.bytes_per_token)
    times: dict[str, Any] = {
        name: value
        for name in ("efficiency", "overhead_s", "bytes_per_s", "flops_per_s", "memory_bytes")
        if (value := getattr(options, name)) is not None
    }
    times["from"] = "roofline"
    if fitted is not None:
        times = {
            "from": "calibration",
            "created": fitted.created,
            "machine": fitted.conditions.machine.name,
            "residuals": msgspec.to_builtins(fitted.residuals),
            "differs": differences(fitted, context),
        }
    report.executed["engine"] = {
        "step_times": times, "replicas": options.replicas, "router": options.router,
        "max_num_seqs": context.max_num_seqs, "max_model_len": context.max_model_len,
    }  # fmt: skip
    for role in PART_ROLES:
        report.executed[role.value] = {"simulated": True}
    report.executed["kv"] |= {"block_size": shape.block_size, "num_blocks": shape.num_blocks}
    report.executed["transforms"] = [
        {"name": choice.component.name, "simulated": True} for choice in context.transforms
    ]
    return report


def differences(fitted: StepTimes, context: EngineContext) -> list[str]:
    """What is simulated otherwise than it was calibrated, the scheduler apart."""
    conditions = fitted.conditions
    pairs = {
        "model": (context.facts.digest, conditions.model_digest),
        "dtype": (context.dtype, conditions.dtype),
        **{
            role.value: (_told(context.parts[role]), conditions.parts.get(role.value))
            for role in PART_ROLES
            if role not in (Role.SCHEDULER, Role.DECODER)
        },
        "transforms": ([_told(choice) for choice in context.transforms], conditions.parts.get("transforms", [])),
    }
    return [name for name, (ours, theirs) in pairs.items() if ours != theirs]


def _told(choice: Choice) -> dict[str, Any]:
    return {"name": choice.component.name, "options": msgspec.to_builtins(choice.options)}
