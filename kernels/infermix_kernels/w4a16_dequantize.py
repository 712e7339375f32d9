"""4-bit weights as plain numbers: expanded once for products of many rows."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import interpreted, require, require_device, require_rows
from infermix_kernels.pack import RUN, PackedW4
from infermix_kernels.w4a16_tile import load_zeros
from infermix_kernels.w4a16_unpack import offset_of, scaled_plane, split_zeros

#: Elements of the room for expanded weights that is allocated when none is given: 256 MiB in 16 bits. The largest
#: linears of an 8B layer fit in one piece: a product of a few thousand output features fills no large device.
DEFAULT_ROOM = 1 << 27
_ROWS = 64


@triton.jit
def dequantize_kernel(
    words, scales, zeros, out, first_row, last_row, N, K, num_groups, stride_w, stride_out,
    HAS_ZEROS: tl.constexpr, FRACTIONAL: tl.constexpr, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Grid: (runs of 256 columns, tiles of ROWS output features between `first_row` and `last_row`)."""
    PER_STEP: tl.constexpr = 256 // GROUP_SIZE if GROUP_SIZE < 256 else 1
    PLANES: tl.constexpr = 8 // PER_STEP
    DTYPE: tl.constexpr = out.dtype.element_ty
    run = tl.program_id(0)
    tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    features = first_row + tile
    ks = tl.arange(0, 32)
    valid = (features < last_row)[:, None]
    packed = tl.load(words + features.to(tl.int64)[:, None] * stride_w + run * 32 + ks[None, :], mask=valid, other=0)
    for part in tl.static_range(PER_STEP):
        group = (run * 256 + part * (256 // PER_STEP)) // GROUP_SIZE
        scale = tl.load(scales + group * N + features, mask=(features < N) & (group < num_groups), other=0.0)
        zero, rest = split_zeros(load_zeros(zeros, group, features, N, num_groups, HAS_ZEROS), FRACTIONAL)
        offset = offset_of(zero, DTYPE, ASM)
        for within in tl.static_range(PLANES):
            columns = run * 256 + (part * PLANES + within) * 32 + ks
            values = scaled_plane(
                packed, offset[:, None], rest[:, None], scale[:, None], part * PLANES + within, FRACTIONAL, ASM
            )
            at = tile.to(tl.int64)[:, None] * stride_out + columns[None, :]
            tl.store(out + at, values, mask=valid & (columns < K)[None, :])


def dequantize(weight: PackedW4, out: Tensor, *, first_row: int = 0) -> Tensor:
    """Rows `first_row ... first_row + n` of the weight into `out [n, K]`, columns in packed order, in out's dtype."""
    require_rows("out", out)
    require(out.shape[1] == weight.in_features, f"out has {out.shape[1]} columns, the weight {weight.in_features}")
    last = first_row + out.shape[0]
    require(first_row >= 0 and last <= weight.out_features, f"rows {first_row} to {last} of {weight.out_features}")
    require_device(out, weight.words)
    grid = (weight.words.shape[1] // 32, triton.cdiv(out.shape[0], _ROWS))
    if out.numel():
        dequantize_kernel[grid](
            weight.words,
            weight.scales,
            weight.scales if weight.zeros is None else weight.zeros,
            out,
            first_row,
            last,
            weight.out_features,
            weight.in_features,
            weight.scales.shape[0],
            weight.words.stride(0),
            out.stride(0),
            HAS_ZEROS=weight.zeros is not None,
            FRACTIONAL=weight.fractional,
            GROUP_SIZE=weight.group_size,
            ROWS=_ROWS,
            ASM=out.dtype != torch.float32 and not interpreted(),
            num_warps=4,
        )
    return out


def dequantized_product(x: Tensor, weight: PackedW4, bias: Tensor | None, out: Tensor, room: Tensor | None) -> None:
    """`out = x weight^T + bias` by way of expanded weights (`expanded_product`), x being in packed order."""
    expanded_product(x, weight.out_features, partial(dequantize, weight), bias, out, room)


class Expand(Protocol):
    """Writes output features from `first_row` on into `[n, K]`."""

    def __call__(self, out: Tensor, *, first_row: int) -> object: ...


def expanded_product(
    x: Tensor, num_features: int, expand: Expand, bias: Tensor | None, out: Tensor, room: Tensor | None
) -> None:
    """`out [M, num_features] = x [M, K] weight^T + bias`, the weight being what `expand` writes.

    `room` (1-dimensional, in x's dtype) takes as many whole output features at a time as fit; a piece that fits into
    the L2 cache never reaches memory.
    """
    width = x.shape[1]
    if room is None:
        size = min(max(DEFAULT_ROOM, width), num_features * width)
        room = torch.empty(size, dtype=x.dtype, device=x.device)
    require(room.dim() == 1 and room.dtype == x.dtype, f"room must be 1-dimensional, {x.dtype}")
    require(room.numel() >= width, f"room has {room.numel()} elements, one output feature has {width}")
    pieces = triton.cdiv(num_features, room.numel() // width)
    rows = triton.cdiv(triton.cdiv(num_features, pieces), RUN) * RUN
    rows = min(rows, room.numel() // width)
    for first in range(0, num_features, rows):
        last = min(first + rows, num_features)
        piece = room[: (last - first) * width].view(last - first, width)
        expand(piece, first_row=first)
        if bias is None:
            torch.mm(x, piece.t(), out=out[:, first:last])
        else:
            torch.addmm(bias[first:last], x, piece.t(), out=out[:, first:last])
