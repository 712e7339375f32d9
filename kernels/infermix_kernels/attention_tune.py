"""Measures launch parameters of attention for one model shape on this machine and keeps them on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infermix_kernels.attention import Workspace, paged_attention
from infermix_kernels.attention_call import Call
from infermix_kernels.attention_prepare import splits_pay
from infermix_kernels.launch import Launch, LaunchTable, ShapeClass, tune

#: (sequences, query length, context): a full device, a few long sequences, a long prompt.
_WORKS = ((64, 1, 4096), (1, 1, 16384), (1, 4096, 4096))


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


def tune_attention(
    shape: ModelShape,
    directory: Path,
    device: torch.device,
    measure: Callable[[Callable[[], object]], float] | None = None,
) -> dict[ShapeClass, Launch]:
    """Takes minutes, nearly all of it compiling. A `LaunchTable` of `directory` finds the results."""
    table = LaunchTable(directory, device)
    found: dict[ShapeClass, Launch] = {}
    for work in _WORKS:
        arguments = _arguments(shape, work, device)
        arguments["workspace"] = Workspace.allocate(device)
        wanted = _shape_class(arguments, work)
        found[wanted] = tune(wanted, partial(_run, arguments), table, measure=measure)
    return found


def _run(arguments: dict[str, Any], launch: Launch) -> None:
    paged_attention(**arguments, launch=launch)


def _shape_class(arguments: dict[str, Any], work: tuple[int, int, int]) -> ShapeClass:
    _, query_len, context_len = work
    call = Call(
        q=arguments["q"],
        keys=arguments["keys"],
        values=arguments["values"],
        out=arguments["out"],
        cu_seqlens_q=arguments["cu_seqlens_q"],
        context_lens=arguments["context_lens"],
        block_tables=arguments["block_tables"],
        sinks=None,
        scales=(arguments["key_scales"], arguments["value_scales"]),
    )
    if splits_pay(call, query_len, context_len, tree=False):
        return call.split_class(query_len)
    return call.shape_class("prefill", 128)


def _arguments(shape: ModelShape, work: tuple[int, int, int], device: torch.device) -> dict[str, Any]:
    """Random contents: zeros would be faster than what a model holds."""
    batch, query, context = work
    blocks = -(-context // shape.block_size) if shape.block_size else 0
    layout = (batch * blocks, shape.block_size) if blocks else (batch, context)
    tables = torch.randperm(batch * blocks, device=device).to(torch.int32).view(batch, blocks) if blocks else None
    keys, key_scales = _pool((*layout, shape.num_kv_heads, shape.key_dim), shape, device)
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
        "block_tables": tables,
        "scale": shape.key_dim**-0.5,
        "max_query_len": query,
        "max_context_len": context,
        "out": q.new_empty(batch * query, shape.num_heads, shape.value_dim),
    }


def _pool(size: tuple[int, int, int, int], shape: ModelShape, device: torch.device) -> tuple[Tensor, Tensor | None]:
    data = torch.randn(size, device=device, dtype=shape.dtype)
    if shape.kv_dtype is None:
        return data, None
    scales = torch.full((size[0], size[2], size[1]), 0.03, device=device)
    return (data * 40).clamp(-127, 127).to(shape.kv_dtype), scales.transpose(1, 2)
