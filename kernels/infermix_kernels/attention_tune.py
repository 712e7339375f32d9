"""Measures launch parameters of attention for one model shape on this machine and keeps them on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infermix_kernels.attention import Workspace, paged_attention
from infermix_kernels.attention_call import Call
from infermix_kernels.attention_prepare import splits_pay
from infermix_kernels.launch import Launch, LaunchTable, ShapeClass, axes, default_launch, fits
from infermix_kernels.search import Measure, search, seconds_of

#: Bytes of keys and values between two reads of the same ones, so that none comes from a cache.
_COLD_BYTES = 200 << 20


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the kernels see of a model and a KV layout; `block_size` 0 means dense rows."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    #: Values are the first numbers of the keys (latent attention).
    shared_values: bool = False

    def __str__(self) -> str:
        kv = "" if self.kv_dtype is None else f", KV {self.kv_dtype}"
        return f"attention {self.num_heads}/{self.num_kv_heads} x {self.key_dim}, blocks of {self.block_size}{kv}"


@dataclass(frozen=True)
class Work:
    """Sequences, query length and context that stand for a class of calls."""

    num_seqs: int
    query_len: int
    context_len: int

    def shrunk(self, max_context_len: int, max_num_seqs: int) -> Work:
        context = min(self.context_len, max_context_len)
        return Work(min(self.num_seqs, max_num_seqs), min(self.query_len, context), context)


#: A full device, a few long sequences, verification of a few tokens, a long prompt.
WORKS = (Work(64, 1, 4096), Work(1, 1, 16384), Work(16, 8, 4096), Work(1, 4096, 4096))


def attention_points(
    shape: ModelShape,
    table: LaunchTable,
    device: torch.device,
    *,
    max_context_len: int,
    max_num_seqs: int,
    measure: Measure | None = None,
) -> Iterator[tuple[ShapeClass, Callable[[], Launch]]]:
    """The classes of calls of a model that `table` does not have yet, each with what measures and stores it."""
    seen: set[ShapeClass] = set()
    for work in WORKS:
        work = work.shrunk(max_context_len, max_num_seqs)
        wanted = _class_of(_call(shape, work, "meta"), work, device)
        if wanted not in seen and wanted not in table:
            seen.add(wanted)
            yield wanted, partial(_tune, shape, work, wanted, table, device, measure)


def _tune(
    shape: ModelShape,
    work: Work,
    wanted: ShapeClass,
    table: LaunchTable,
    device: torch.device,
    measure: Measure | None,
) -> Launch:
    calls = _calls(shape, work, device)

    def seconds(launch: Launch) -> float | None:
        if not fits(wanted, launch):
            return None
        return seconds_of([partial(call, launch=launch) for call in calls], measure)

    best, shortest = search([default_launch(wanted)], lambda launch: axes(wanted), seconds)
    table.store(wanted, best, shortest)
    return best


def _class_of(call: Call, work: Work, device: torch.device) -> ShapeClass:
    if splits_pay(call, work.query_len, work.context_len, tree=False, device=device):
        return call.split_class(work.query_len, device)
    return call.shape_class("prefill", 128)


def _calls(shape: ModelShape, work: Work, device: torch.device) -> list[Callable[..., object]]:
    """Calls on different memory. Random contents: zeros would be faster than what a model holds."""
    arguments = _arguments(shape, work, device)
    size = sum(arguments[name].numel() * arguments[name].element_size() for name in ("keys", "values"))
    copies = max(1, min(16, -(-_COLD_BYTES // size))) if work.query_len < 64 and device.type == "cuda" else 1
    more = [arguments, *(_arguments(shape, work, device) for _ in range(copies - 1))]
    workspace = Workspace.allocate(device)
    return [partial(paged_attention, **each, workspace=workspace) for each in more]


def _call(shape: ModelShape, work: Work, device: str) -> Call:
    arguments = _arguments(shape, work, torch.device(device))
    return Call(
        q=arguments["q"],
        keys=arguments["keys"],
        values=arguments["values"],
        out=arguments["out"],
        cu_seqlens_q=arguments["cu_seqlens_q"],
        context_lens=arguments["context_lens"],
        block_tables=arguments["block_tables"],
        sinks=None,
        scales=(arguments["key_scales"], arguments["value_scales"]),
        shared=shape.shared_values,
    )


def _arguments(shape: ModelShape, work: Work, device: torch.device) -> dict[str, Any]:
    batch, query, context = work.num_seqs, work.query_len, work.context_len
    blocks = -(-context // shape.block_size) if shape.block_size else 0
    layout = (batch * blocks, shape.block_size) if blocks else (batch, context)
    keys, key_scales = _pool((*layout, shape.num_kv_heads, shape.key_dim), shape, device)
    if shape.shared_values:
        values, value_scales = keys[..., : shape.value_dim], key_scales
    else:
        values, value_scales = _pool((*layout, shape.num_kv_heads, shape.value_dim), shape, device)
    q = torch.randn(batch * query, shape.num_heads, shape.key_dim, device=device, dtype=shape.dtype)
    return {
        "q": q,
        "keys": keys,
        "values": values,
        "key_scales": key_scales,
        "value_scales": value_scales,
        "cu_seqlens_q": torch.arange(0, batch * query + 1, query, device=device, dtype=torch.int32),
        "context_lens": torch.full((batch,), context, device=device, dtype=torch.int32),
        "block_tables": _tables(batch, blocks, device) if blocks else None,
        "scale": shape.key_dim**-0.5,
        "max_query_len": query,
        "max_context_len": context,
        "out": q.new_empty(batch * query, shape.num_heads, shape.value_dim),
    }


def _tables(batch: int, blocks: int, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(batch, blocks, device=device, dtype=torch.int32)
    return torch.randperm(batch * blocks, device=device).to(torch.int32).view(batch, blocks)


def _pool(size: tuple[int, int, int, int], shape: ModelShape, device: torch.device) -> tuple[Tensor, Tensor | None]:
    data = torch.randn(size, device=device, dtype=shape.dtype)
    if shape.kv_dtype is None:
        return data, None
    scales = torch.full((size[0], size[2], size[1]), 0.03, device=device)
    return (data * 40).clamp(-127, 127).to(shape.kv_dtype), scales
