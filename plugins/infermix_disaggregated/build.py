"""Builds both workers: the one for outputs here, the one for prompts in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infermix.engine.assembly import assemble
from infermix.engine.components import NativeOptions
from infermix.errors import Unsupported
from infermix.roles.component import Role
from infermix.roles.engine import EngineContext

from infermix_disaggregated.engine import DisaggregatedEngine
from infermix_disaggregated.messages import spec_of
from infermix_disaggregated.prefiller import Prefiller
from infermix_disaggregated.probe import choose_way
from infermix_disaggregated.transfer import DEVICE, HOST, check_layout


def build_engine(options: Any, context: EngineContext) -> DisaggregatedEngine:
    """Both workers load at the same time on a CPU, one after the other on a GPU, whose memory they share."""
    _refuse(context)
    shared = replace(
        context, kv_memory_bytes=_half(context.kv_memory_bytes), kv_swap_bytes=_half(context.kv_swap_bytes)
    )
    on_gpu = context.machine.device.startswith("cuda")
    first = replace(shared, kv_memory_fraction=context.kv_memory_fraction / 2) if on_gpu else shared
    prefill = Prefiller(spec_of(first, options))
    try:
        ready = prefill.wait_ready() if on_gpu else None
        decode: Any = assemble(_native(options), shared)
        check_layout(decode.store, decode.shape)
        ready = ready or prefill.wait_ready()
        on_device, refusal = choose_way(options.handover, prefill, str(decode.model.device))
    except BaseException:
        prefill.close()
        raise
    report = decode.report()
    report.setup_s |= {f"prefill_{name}": seconds for name, seconds in ready.setup_s.items()}
    report.weight_bytes = (report.weight_bytes or 0) + (ready.weight_bytes or 0)
    report.kv_bytes = (report.kv_bytes or 0) + (ready.kv_bytes or 0)
    layout = context.parts[Role.KV].component.name
    way = {"path": DEVICE if on_device else HOST} | ({} if refusal is None else {"device_refused": refusal})
    return DisaggregatedEngine(decode, prefill, report, layout, context.clock_ns, way)


def _half(num_bytes: int | None) -> int | None:
    return None if num_bytes is None else num_bytes // 2


def _native(options: Any) -> NativeOptions:
    """Those that are not about two workers."""
    return NativeOptions(**{name: getattr(options, name) for name in NativeOptions.__struct_fields__})


def _refuse(context: EngineContext) -> None:
    """What a plan says, for whoever comes here without one."""
    kv = context.parts[Role.KV]
    if "kv:export" not in kv.component.provides(kv.options, context.facts, context.machine):
        raise Unsupported(f"kv {kv.component.name!r} does not provide kv:export, so its blocks are not handed over")
    decoder = context.parts[Role.DECODER]
    provided = decoder.component.provides(decoder.options, context.facts, context.machine)
    if not provided.isdisjoint(("decoder:drafts", "decoder:search")):
        raise Unsupported(f"decoder {decoder.component.name!r} keeps state of prompts, which is not handed over")
