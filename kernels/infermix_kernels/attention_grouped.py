"""Attention over keys and values of 4 or 2 bits in KIVI's arrangement, with a full-precision tail."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.attention_call import MAX_SPLIT_ROWS, Call, Prepared, Rules, Workspace
from infermix_kernels.attention_checks import MAX_HEAD_DIM, check_queries, check_table_contents
from infermix_kernels.attention_grouped_split import grouped_kernel
from infermix_kernels.attention_prepare import num_splits, prepare_combine
from infermix_kernels.attention_repeat import run_repeatedly
from infermix_kernels.checks import require, require_device, require_shape
from infermix_kernels.launch import Launch, overlaps_launches
from infermix_kernels.reference.grouped import GroupedPools

__all__ = ["GroupedPools", "grouped_attention"]

#: Rows of a tile. From 64 on, products take their operands from shared memory, and triton 3.6 finds no layout for
#: what is dequantized on the way there.
MAX_ROWS = 32


def grouped_attention(
    q: Tensor,
    pools: GroupedPools,
    *,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    tail_rows: Tensor,
    scale: float,
    max_query_len: int,
    max_context_len: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    launch: Launch | None = None,
    check_block_tables: bool = False,
) -> Tensor:
    """`q [T, H, Dk]` -> `[T, H, Dv]`: prefill, chunks, decode and verification, as `attention.paged_attention`.

    `tail_rows [B]` int32, of any stride: the row of each sequence's tail. Groups are whole words of 32 bits: their
    size and both head dimensions are multiples of `32 / bits`. Tails have the dtype of `q`. A token whose tail slot
    was overwritten is never read there, nor is memory that no context covers.

    Raises `ValueError` before anything is launched when shapes, dtypes or strides do not fit; with
    `check_block_tables` (reads the device) also when an id, a row or a context length points outside.
    """
    _check_pools(q, pools)
    check_queries(q, pools.tail_keys.shape[2], cu_seqlens_q, context_lens, (max_query_len, max_context_len), window)
    _check_places(pools, context_lens, block_tables, tail_rows, max_context_len)
    if check_block_tables:
        blocks = pools.keys.shape[0] * pools.group_size // pools.block_size
        check_table_contents((blocks, pools.block_size), cu_seqlens_q, context_lens, block_tables)
        wrong = (tail_rows < 0) | (tail_rows >= pools.tail_keys.shape[0])
        require(not bool(wrong.any()), f"tail_rows are {tail_rows.tolist()} of {pools.tail_keys.shape[0]} rows")
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], pools.tail_values.shape[3])
    require_shape("out", out, (*q.shape[:2], pools.tail_values.shape[3]))
    require(out.is_contiguous() and out.dtype == q.dtype, f"out must be contiguous {q.dtype}")
    if sinks is not None:
        require(sinks.shape == q.shape[1:2] and sinks.is_contiguous(), f"sinks must be [{q.shape[1]}]")
    require_device(q, pools.keys, pools.tail_keys, out, cu_seqlens_q, context_lens, block_tables, tail_rows, sinks)
    if not q.shape[0] or not context_lens.shape[0]:
        return out
    tensors = {
        "q": q,
        "keys": pools.keys.view(torch.int32),
        "values": pools.values.view(torch.int32),
        "key_factors": pools.key_factors.view(torch.int32),
        "value_factors": pools.value_factors.view(torch.int32),
        "tail_keys": pools.tail_keys,
        "tail_values": pools.tail_values,
        "out": out,
        "cu_seqlens": cu_seqlens_q,
        "context_lens": context_lens,
        "tables": block_tables,
        "tail_rows": tail_rows,
        "sinks": sinks,
    }
    rules, bounds = Rules(scale, window, softcap, None), (max_query_len, max_context_len)
    facts = ("grouped", bounds, scale, window, softcap, pools.block_size, pools.num_recent, workspace, launch)
    run_repeatedly(tensors, facts, workspace, lambda: prepare(tensors, pools, rules, bounds, workspace, launch))
    return out


def default_launch(element_bytes: int, rows: int, widest: int, group_size: int) -> Launch:
    """Tiles lie within a group where one has 16 tokens at least: factors of keys are then loaded once a tile."""
    tokens = next((size for size in (64, 32, 16) if group_size % size == 0), 32)
    rows = min(rows, MAX_ROWS)
    if element_bytes == 4:
        return Launch(rows, min(tokens, 32), 4, 2)
    if rows > 16:
        return Launch(rows, tokens, 4, 2, 2)
    return Launch(rows, tokens, 4 if tokens * widest > 4096 else 2, 3, 8)


def prepare(
    tensors: dict[str, Tensor | None],
    pools: GroupedPools,
    rules: Rules,
    bounds: tuple[int, int],
    workspace: Workspace | None,
    launch: Launch | None,
) -> Prepared:
    """Grid and constants of the one kernel, from what the host knows alone."""
    call = _tail_call(tensors, pools)
    max_query_len, max_context_len = bounds
    if launch is None:
        rows = min(max(16, triton.next_power_of_2(max_query_len * call.group)), MAX_SPLIT_ROWS)
        widest = max(pools.tail_keys.shape[3], pools.tail_values.shape[3])
        launch = default_launch(call.q.element_size(), rows, widest, pools.group_size)
    units, row_tiles, geometry = call.units(launch.block_rows, max_query_len)
    splits = num_splits(units, max_context_len, launch, call.q.device)
    value_dim = max(16, call.values.shape[3])
    if splits > 1 and workspace is None:
        workspace = Workspace.allocate(call.q.device, max(units * splits * launch.block_rows * value_dim, 1 << 16))
    if workspace is not None:
        splits = max(1, min(splits, workspace.max_slots(launch.block_rows, value_dim) // units))
    used = workspace if splits > 1 else None
    constants = _constants(call, pools, rules, launch)
    constants |= {"GROUP": call.group, "HEADS": geometry.heads, "SPLIT": splits > 1}
    arguments = (
        *(tensors[name] for name in grouped_kernel.arg_names[:8]),
        *((used.sums, used.stats) if used else (None, None)),
        *(tensors[name] for name in ("cu_seqlens", "context_lens", "tables", "tail_rows", "sinks")),
        call.q.shape[1],
        geometry.head_tiles,
        row_tiles,
        splits,
        *rules.numbers(),
        *call.q.stride()[:2],
        _stride(tensors, "tables"),
        _stride(tensors, "tail_rows"),
    )
    then = None
    if used is not None:
        known = {**constants, "TREE": False}
        then = prepare_combine(call, rules, used, geometry, (row_tiles, splits), known, launch)
    grid = (geometry.head_tiles * splits * call.num_seqs * row_tiles, 1)
    return Prepared(grouped_kernel, grid, arguments, constants, launch, then)


def _stride(tensors: dict[str, Tensor | None], name: str) -> int:
    tensor = tensors[name]
    assert tensor is not None
    return tensor.stride(0)


def _tail_call(tensors: dict[str, Tensor | None], pools: GroupedPools) -> Call:
    """The call as if everything were in the tail: heads, dimensions and rows are the same."""
    q, out, starts, contexts = (tensors[name] for name in ("q", "out", "cu_seqlens", "context_lens"))
    assert q is not None and out is not None and starts is not None and contexts is not None  # noqa: PT018
    return Call(q, pools.tail_keys, pools.tail_values, out, starts, contexts, None, tensors["sinks"], (None, None))


def _constants(call: Call, pools: GroupedPools, rules: Rules, launch: Launch) -> dict[str, Any]:
    pdl, least = overlaps_launches(call.q.device), 16 * 16 // pools.bits
    constants = {
        "HKV": pools.keys.shape[1],
        "DK": pools.tail_keys.shape[3],
        "DV": pools.tail_values.shape[3],
        "PAD_K": max(least, triton.next_power_of_2(pools.tail_keys.shape[3])),
        "PAD_V": max(least, triton.next_power_of_2(pools.tail_values.shape[3])),
        "BLOCK_M": launch.block_rows,
        "BLOCK_N": launch.block_tokens,
        "BLOCK_SIZE": pools.block_size,
        "CAPACITY": pools.tail_keys.shape[1],
        "GROUP_SIZE": pools.group_size,
        "RECENT": pools.num_recent,
        "BITS": pools.bits,
        "WINDOW": rules.window is not None,
        "SOFTCAP": rules.softcap is not None,
        "SINKS": call.sinks is not None,
        "PDL": pdl,
        "COMPUTE": tl.float32 if call.q.dtype == torch.float32 else tl.float16,
        "PRECISION": "ieee" if call.q.dtype == torch.float32 else "tf32",
        "NATIVE": not triton.knobs.runtime.interpret and call.q.dtype != torch.float32,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        **({"maxnreg": launch.max_registers} if launch.max_registers else {}),
    }
    return constants | ({"launch_pdl": True} if pdl else {})


def _check_pools(q: Tensor, pools: GroupedPools) -> None:
    groups, heads, size = pools.keys.shape[:3]
    rows, capacity, _, key_dim = pools.tail_keys.shape
    value_dim = pools.tail_values.shape[3]
    bits = pools.bits
    require(bits in (2, 4), f"keys have {pools.keys.shape[3]} bytes for {key_dim} numbers; supported: 4 and 2 bits")
    words = 32 // bits
    fitting = all(width % words == 0 for width in (size, key_dim, value_dim))
    require(fitting, f"groups of {size} in heads of {key_dim} and {value_dim}: multiples of {words} are needed")
    require(max(key_dim, value_dim) <= MAX_HEAD_DIM, f"head dim {max(key_dim, value_dim)}; at most {MAX_HEAD_DIM}")
    require(value_dim % size == 0, f"groups of {size} do not divide a head of {value_dim}")
    require(pools.block_size % size == 0, f"groups of {size} do not divide blocks of {pools.block_size}")
    require_shape("values", pools.values, (groups, heads, size, value_dim * bits // 8))
    require_shape("key_factors", pools.key_factors, (groups, heads, key_dim, 2))
    require_shape("value_factors", pools.value_factors, (groups, heads, size, value_dim // size, 2))
    require_shape("tail_keys", pools.tail_keys, (rows, capacity, heads, q.shape[2]))
    require_shape("tail_values", pools.tail_values, (rows, capacity, heads, value_dim))
    for name, dtype in (("keys", torch.uint8), ("values", torch.uint8), ("key_factors", torch.float16)):
        require(getattr(pools, name).dtype == dtype, f"{name} are {getattr(pools, name).dtype}, must be {dtype}")
    require(pools.value_factors.dtype == torch.float16, f"value_factors are {pools.value_factors.dtype}, not fp16")
    for name in ("tail_keys", "tail_values"):
        require(getattr(pools, name).dtype == q.dtype, f"{name} are {getattr(pools, name).dtype}, q is {q.dtype}")
    for name in ("keys", "values", "key_factors", "value_factors", "tail_keys", "tail_values"):
        require(getattr(pools, name).is_contiguous(), f"{name} must be contiguous")


def _check_places(
    pools: GroupedPools, context_lens: Tensor, block_tables: Tensor, tail_rows: Tensor, max_context_len: int
) -> None:
    num_seqs = context_lens.shape[0]
    for name, tensor, dims in (("block_tables", block_tables, 2), ("tail_rows", tail_rows, 1)):
        require(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, must be int32")
        require(tensor.dim() == dims, f"{name} has {tensor.dim()} dimensions, must have {dims}")
        require(tensor.shape[0] >= num_seqs, f"{name} has fewer rows than context_lens")
    require(block_tables.shape[1] <= 1 or block_tables.stride(1) == 1, "block_tables must have contiguous rows")
    reach = block_tables.shape[1] * pools.block_size + pools.num_recent
    require(reach >= max_context_len, f"block_tables reach {reach} tokens, max_context_len is {max_context_len}")
