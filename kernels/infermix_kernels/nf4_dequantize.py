"""NF4 weights as plain numbers: expanded once for products of many rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import interpreted, require, require_device, require_floats, require_rows
from infermix_kernels.nf4_pack import PackedNf4
from infermix_kernels.nf4_table import block_scales, look_up

_ROWS = 64


@triton.jit
def nf4_dequantize_kernel(
    words, absmax, absmax_scale, absmax_mean, table, out, first_row, last_row, K, blocks, stride_w, stride_out,
    BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: (runs of 256 columns, tiles of ROWS output features between `first_row` and `last_row`)."""
    WITHIN: tl.constexpr = BLOCK < 32
    PARTS: tl.constexpr = 1 if BLOCK >= 256 else 8 if WITHIN else 256 // BLOCK
    PLANES: tl.constexpr = 8 // PARTS
    run = tl.program_id(0)
    tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    features = first_row + tile
    ks = tl.arange(0, 32)
    valid = (features < last_row)[:, None]
    packed = tl.load(words + features.to(tl.int64)[:, None] * stride_w + run * 32 + ks[None, :], mask=valid, other=0)
    for part in tl.static_range(PARTS):
        if WITHIN:  # blocks that are smaller than a plane
            group = (run * 256 + part * 32 + ks) // BLOCK
            index = features[:, None] * blocks + group[None, :]
            known = valid & (group < blocks)[None, :]
            scale = block_scales(absmax, absmax_scale, absmax_mean, index, known, SCALE_BLOCK, ASM)
        else:
            group = (run * 256 + part * (256 // PARTS)) // BLOCK
            known = (features < last_row) & (group < blocks)
            index = features * blocks + group
            scale = block_scales(absmax, absmax_scale, absmax_mean, index, known, SCALE_BLOCK, ASM)[:, None]
        for plane in tl.static_range(part * PLANES, part * PLANES + PLANES):
            columns = run * 256 + plane * 32 + ks
            values = look_up(packed, table, plane, ASM) * scale
            at = tile.to(tl.int64)[:, None] * stride_out + columns[None, :]
            tl.store(out + at, values.to(out.dtype.element_ty), mask=valid & (columns < K)[None, :])


def dequantize(weight: PackedNf4, out: Tensor, *, first_row: int = 0) -> Tensor:
    """Rows `first_row ... first_row + n` of the weight into `out [n, K]`, rounded once to out's dtype."""
    require_floats(out=out)
    require_rows("out", out)
    require(out.shape[1] == weight.in_features, f"out has {out.shape[1]} columns, the weight {weight.in_features}")
    last = first_row + out.shape[0]
    require(first_row >= 0 and last <= weight.out_features, f"rows {first_row} to {last} of {weight.out_features}")
    require_device(out, weight.words)
    grid = (weight.words.shape[1] // 32, triton.cdiv(out.shape[0], _ROWS))
    if out.numel():
        nf4_dequantize_kernel[grid](
            weight.words,
            weight.absmax,
            weight.absmax if weight.absmax_scale is None else weight.absmax_scale,
            weight.absmax if weight.absmax_mean is None else weight.absmax_mean,
            weight.tables[0],
            out,
            first_row,
            last,
            weight.in_features,
            weight.blocks,
            weight.words.stride(0),
            out.stride(0),
            BLOCK=weight.block_size,
            SCALE_BLOCK=weight.scale_block,
            ROWS=_ROWS,
            ASM=not interpreted(),
            num_warps=4,
        )
    return out
