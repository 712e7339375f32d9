"""Which kernel computes a call, with which grid and constants: decided from what the host knows alone."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from infermix_kernels import attention_tile as tile
from infermix_kernels.attention_call import (
    MAX_SPLIT_ROWS,
    Call,
    Geometry,
    Prepared,
    Rules,
    Workspace,
    addressing,
    fold,
)
from infermix_kernels.attention_prefill import prefill_kernel
from infermix_kernels.attention_split import combine_kernel, split_kernel
from infermix_kernels.launch import (
    Launch,
    LaunchTable,
    ShapeClass,
    default_launch,
    num_multiprocessors,
    overlaps_launches,
)

_MAX_SPLITS = 64


def _find(launches: LaunchTable | None, shape: ShapeClass) -> Launch:
    return default_launch(shape) if launches is None else launches.find(shape)


def splits_pay(
    call: Call, max_query_len: int, max_context_len: int, tree: bool, device: torch.device | None = None
) -> bool:
    """Rows of a sequence fit one tile, or long queries would leave most of the device idle over a long context.

    Values that are part of their keys are read by the split kernel alone.
    """
    if call.shared or tree or max_query_len * call.group <= 64:
        return True
    if max_context_len < 1024:
        return False
    programs = call.num_seqs * call.keys.shape[2] * -(-max_query_len * call.group // MAX_SPLIT_ROWS)
    return 2 * programs <= num_multiprocessors(device or call.q.device)


def prepare(
    call: Call,
    rules: Rules,
    bounds: tuple[int, int],
    workspace: Workspace | None = None,
    launches: LaunchTable | None = None,
    launch: Launch | None = None,
) -> Prepared:
    """Choose kernel, grid and constants. `bounds` are the longest query and the longest context."""
    if splits_pay(call, *bounds, rules.tree_mask is not None):
        return _prepare_split(call, rules, *bounds, workspace, launches, launch)
    return _prepare_prefill(call, rules, launches, launch)


def _prepare_prefill(call: Call, rules: Rules, launches: LaunchTable | None, launch: Launch | None) -> Prepared:
    launch = launch or _find(launches, call.shape_class("prefill", 128))
    geometry = fold(call.q.shape[1], call.keys.shape[2], launch.block_rows)
    grid = (call.q.shape[0] // geometry.tokens + call.num_seqs, geometry.head_tiles)
    described = launch.described and _describable(call, rules, launch.block_tokens)
    arguments = (
        *call.tensors(),
        *((_describe(pool, launch.block_tokens) if described else None) for pool in (call.keys, call.values)),
        call.cu_seqlens_q,
        call.context_lens,
        call.block_tables,
        call.sinks,
        call.num_seqs,
        call.q.shape[1],
        *rules.numbers(),
        *call.strides(),
    )
    constants = call.constants(launch, geometry, rules)
    constants |= {"DESCRIBED": described}
    return Prepared(prefill_kernel, grid, arguments, constants, launch)


def _describable(call: Call, rules: Rules, block_tokens: int) -> bool:
    """Whether the copy engine can read whole tiles: pools are matrices of token slots, a tile within one block."""
    if rules.window is not None or rules.softcap is not None or call.q.element_size() != 2:
        return False
    if call.keys.dtype != call.q.dtype or addressing(call.block_size, block_tokens) > tile.TILE_IN_BLOCK.value:
        return False
    return all(_is_matrix(pool) for pool in (call.keys, call.values))


def _is_matrix(pool: Tensor) -> bool:
    width = pool.shape[2] * pool.shape[3]
    power_of_two = pool.shape[3] & (pool.shape[3] - 1) == 0
    return pool.stride()[:3] == (pool.shape[1] * width, width, pool.shape[3]) and power_of_two


def _describe(pool: Tensor, block_tokens: int) -> TensorDescriptor:
    width = pool.shape[2] * pool.shape[3]
    shape = [pool.shape[0] * pool.shape[1], width]
    return TensorDescriptor(pool, shape, [width, 1], [block_tokens, pool.shape[3]])


def _prepare_split(
    call: Call,
    rules: Rules,
    max_query_len: int,
    max_context_len: int,
    workspace: Workspace | None,
    launches: LaunchTable | None,
    launch: Launch | None,
) -> Prepared:
    if launch is None:
        launch = _find(launches, call.split_class(max_query_len))
    units, row_tiles, geometry = call.units(launch.block_rows, max_query_len)
    splits = num_splits(units, max_context_len, launch, call.q.device)
    value_dim = max(16, call.values.shape[3])
    if splits > 1 and workspace is None:
        needed = units * splits * launch.block_rows * value_dim
        workspace = Workspace.allocate(call.q.device, max(needed, 1 << 16))
    if workspace is not None:
        splits = max(1, min(splits, workspace.max_slots(launch.block_rows, value_dim) // units))
    used = workspace if splits > 1 else None
    arguments = (
        *call.tensors(),
        *((used.sums, used.stats) if used else (None, None)),
        call.cu_seqlens_q,
        call.context_lens,
        call.block_tables,
        call.sinks,
        rules.tree_mask,
        call.q.shape[1],
        geometry.head_tiles,
        row_tiles,
        splits,
        *rules.numbers(),
        *call.strides(),
    )
    pdl = overlaps_launches(call.q.device)
    constants = call.constants(launch, geometry, rules)
    constants |= {"TREE": rules.tree_mask is not None, "SHARED": call.shared, "SPLIT": splits > 1, "PDL": pdl}
    if pdl:
        constants["launch_pdl"] = True
    grid = (geometry.head_tiles * splits * call.num_seqs * row_tiles, 1)
    then = None
    if used is not None:
        then = prepare_combine(call, rules, used, geometry, (row_tiles, splits), constants, launch)
    return Prepared(split_kernel, grid, arguments, constants, launch, then)


def prepare_combine(
    call: Call,
    rules: Rules,
    workspace: Workspace,
    geometry: Geometry,
    counts: tuple[int, int],
    split_constants: dict[str, Any],
    launch: Launch,
) -> Prepared:
    """`counts` are row tiles and splits; everything else is as in the split kernel's launch."""
    row_tiles, splits = counts
    arguments = (
        call.out,
        workspace.sums,
        workspace.stats,
        call.cu_seqlens_q,
        call.context_lens,
        call.q.shape[1],
        geometry.head_tiles,
        row_tiles,
        splits,
        rules.window or 0,
    )
    same = ("HEADS", "DV", "PAD_V", "BLOCK_M", "BLOCK_N", "WINDOW", "TREE", "PDL")
    constants: dict[str, Any] = {name: split_constants[name] for name in same}
    padded = triton.next_power_of_2(splits)
    constants |= {name: split_constants.get(name, 0) for name in ("GROUP_SIZE", "RECENT")}
    constants |= {"PAD_SPLITS": padded, "num_warps": 8 if padded * constants["PAD_V"] > 8192 else 4}
    if constants["PDL"]:
        constants["launch_pdl"] = True
    grid = (geometry.head_tiles * geometry.heads * geometry.tokens * call.num_seqs * row_tiles, 1)
    return Prepared(combine_kernel, grid, arguments, constants, launch)


def num_splits(units: int, max_context_len: int, launch: Launch, device: torch.device) -> int:
    """How many programs share the context of one unit (sequence, KV head, row tile)."""
    wanted = num_multiprocessors(device) * launch.programs_per_sm // units
    tiles = -(-max_context_len // launch.block_tokens)
    return max(1, min(wanted, tiles, _MAX_SPLITS))
