"""Linear layers with 4-bit weights and 16-bit activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import (
    interpreted,
    require,
    require_device,
    require_floats,
    require_rows,
    require_shape,
    require_vector,
)
from infermix_kernels.matmul import measured_launch, new_output, rows_tile
from infermix_kernels.matmul_launch import (
    ExpandLaunch,
    MatmulLaunch,
    MatmulWorkspace,
    check_matrix,
    launch_for_fp32,
    split_for,
    usable_split,
)
from infermix_kernels.matmul_table import LinearShape, MatmulTable
from infermix_kernels.pack import PLANE, RUN, PackedW4
from infermix_kernels.w4a16_dequantize import dequantized_product
from infermix_kernels.w4a16_tile import w4_tile_kernel

_PROGRAMS = 384
#: With more rows, expanding the weights once costs less than doing it in every tile. Unpacking alternates with the
#: tensor cores there (Triton waits for a product whose operand comes from registers), which leaves about 0.6 of them;
#: expanding writes 2 bytes for each weight, 110 to 140 us of an 8B layer on an H200, beside cuBLAS at full speed.
MAX_TILED_ROWS = 256
#: Two programs of this tile share a multiprocessor of an H200 and hide each other's unpacking.
SHARED_TILE = MatmulLaunch(64, 128, RUN, 1, 4, 2)
#: One program of this tile fills a multiprocessor; long products leave few waits.
SQUARE_TILE = MatmulLaunch(128, 128, RUN, 1, 8, 2, planes=4)
#: Up to this many rows a tile, group sums are scaled instead of weights: exact, and cheap on a small tile.
_EXACT_ROWS = 64


@triton.jit
def gather_columns_kernel(x, order, out, width, stride_x, stride_out, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(order + cols, mask=cols < width, other=0)
    values = tl.load(x + row * stride_x + source, mask=cols < width, other=0.0)
    tl.store(out + row * stride_out + cols, values, mask=cols < width)


def gather_columns(x: Tensor, order: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x[:, order]`: `x [M, K]`, `order [K]` int32."""
    require_rows("x", x)
    require(order.dtype == torch.int32, f"order is {order.dtype}, must be int32")
    require_vector("order", order, x.shape[1])
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    require_shape("out", out, tuple(x.shape))
    require_rows("out", out)
    require_device(x, order, out)
    grid = (x.shape[0], triton.cdiv(x.shape[1], 1024))
    if x.numel():
        gather_columns_kernel[grid](x, order, out, x.shape[1], x.stride(0), out.stride(0), BLOCK=1024, num_warps=4)
    return out


def w4a16_linear(
    x: Tensor,
    weight: PackedW4,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    workspace: MatmulWorkspace | None = None,
    room: Tensor | None = None,
    launch: MatmulLaunch | ExpandLaunch | None = None,
    launches: MatmulTable | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x [M, K] weight^T + bias [N]`, in x's dtype, summed in fp32.

    `scratch [M, K]` holds x in the order of an act-order weight. Small tiles scale the sum of each group, large ones
    round scaled weights to x's dtype first (`MatmulLaunch.block_m` above 64). More than MAX_TILED_ROWS rows of 16-bit
    x are multiplied by weights that were expanded before, in pieces that fit into `room` (see `dequantized_product`).
    With zero points between integers, q - zero is rounded to x's dtype.
    `launches` holds measured launch parameters, `launch` overrides them.
    """
    _check(x, weight, bias)
    out = new_output(x, weight.out_features, x.dtype, out)
    require_shape("out", out, (x.shape[0], weight.out_features))
    require_rows("out", out)
    if x.shape[0] == 0:
        return out
    if weight.order is not None:
        x = gather_columns(x, weight.order, out=scratch)
    if launch is None:
        launch = _launch(x, weight, launches)
    if isinstance(launch, ExpandLaunch):
        dequantized_product(x, weight, bias, out, room)
    else:
        _tiles(x, weight, bias, out, launch, workspace, pdl)
    return out


def shape_of(x: Tensor, weight: PackedW4) -> LinearShape:
    """The key of measured launches."""
    return LinearShape(
        "w4a16",
        weight.out_features,
        weight.in_features,
        weight.group_size,
        weight.zeros is not None,
        x.element_size(),
    )


def _launch(x: Tensor, weight: PackedW4, launches: MatmulTable | None) -> MatmulLaunch | ExpandLaunch:
    found = measured_launch(launches, shape_of(x, weight), x, weight.words)
    if isinstance(found, MatmulLaunch | ExpandLaunch):
        return found
    if x.dtype == torch.float32:
        return launch_for_fp32(tile_launch(x.shape[0], weight.out_features, weight.in_features), RUN)
    return default_launch(x.shape[0], weight.out_features, weight.in_features)


def default_launch(num_rows: int, num_columns: int, width: int) -> MatmulLaunch | ExpandLaunch:
    """What was best on an H200 for the four linears of an 8B layer."""
    return ExpandLaunch() if num_rows > MAX_TILED_ROWS else tile_launch(num_rows, num_columns, width)


def tile_launch(num_rows: int, num_columns: int, width: int) -> MatmulLaunch:
    """The tiles of any number of rows."""
    wide, steps = num_columns >= 16384, triton.cdiv(width, RUN)
    split = split_for(triton.cdiv(num_columns, 64), steps, _PROGRAMS)
    if num_rows > 64:
        return MatmulLaunch(128, 256 if num_columns >= 6144 else 128, RUN, 1, 8, 2)
    if num_rows > 16:
        return _middle_launch(rows_tile(num_rows, 64), num_columns, split)
    block_m = rows_tile(num_rows, 16)
    return MatmulLaunch(block_m, 64 if wide else 32, RUN, 2 if wide else split, 2, 3, planes=4)


def _middle_launch(block_m: int, num_columns: int, split: int) -> MatmulLaunch:
    """17 to 64 rows: long products hide the unpacking, and three stages fit beside them but in the widest linear."""
    if num_columns >= 16384:
        return MatmulLaunch(block_m, 64, RUN, 1, 4, 3, planes=4)
    return MatmulLaunch(block_m, 64, RUN, split, 4, 2 if num_columns >= 6144 else 3, planes=2)


def broad_launch(num_rows: int, num_columns: int, width: int) -> MatmulLaunch:
    """Twice as many output features a tile: x is read from the L2 cache half as often."""
    split = split_for(triton.cdiv(num_columns, 128), triton.cdiv(width, RUN), _PROGRAMS // 2)
    return MatmulLaunch(rows_tile(num_rows, 64), 128, RUN, split, 8, 3, planes=4)


def _check(x: Tensor, weight: PackedW4, bias: Tensor | None) -> None:
    require_floats(x=x)
    check_matrix(x, weight.out_features, weight.in_features)
    num_words = -(-weight.in_features // RUN) * PLANE
    require(weight.words.dtype == torch.int32, f"words are {weight.words.dtype}, must be int32")
    require_shape("words", weight.words, (weight.out_features, num_words))
    groups = weight.in_features // weight.group_size
    for name, tensor in (("scales", weight.scales), ("zeros", weight.zeros)):
        if tensor is not None:
            require_shape(name, tensor, (groups, weight.out_features))
            require(tensor.is_contiguous(), f"{name} must be contiguous")
    require(weight.words.is_contiguous(), "words must be contiguous")
    require_vector("bias", bias, weight.out_features)
    require_device(x, weight.words, weight.scales, weight.zeros, weight.order, bias)


def planes_together(launch: MatmulLaunch, group_size: int) -> int:
    """Planes of 32 columns in one product: those of the launch, as far as one group has as many."""
    require(launch.planes in (1, 2, 4), f"planes is {launch.planes}, must be 1, 2 or 4")
    return min(launch.planes, min(group_size, RUN) // PLANE)


def _tiles(
    x: Tensor,
    weight: PackedW4,
    bias: Tensor | None,
    out: Tensor,
    launch: MatmulLaunch,
    workspace: MatmulWorkspace | None,
    pdl: bool,
) -> None:
    num_rows, width = x.shape
    num_columns = weight.out_features
    require(launch.block_k == RUN and launch.swap, f"4-bit weights need swapped launches with block_k {RUN}")
    split_k = usable_split(launch, workspace, num_rows, num_columns)
    w4_tile_kernel[(launch.num_tiles(num_rows, num_columns) * split_k,)](
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out,
        out if bias is None else bias,
        out if workspace is None else workspace.partial,
        out if workspace is None else workspace.counters,
        num_rows,
        num_columns,
        width,
        weight.scales.shape[0],
        x.stride(0),
        weight.words.stride(0),
        out.stride(0),
        HAS_ZEROS=weight.zeros is not None,
        FRACTIONAL=weight.fractional,
        HAS_BIAS=bias is not None,
        GROUP_SIZE=weight.group_size,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        SPLIT_K=split_k,
        GROUP_M=launch.group_m,
        SCALE_WEIGHTS=launch.block_m > _EXACT_ROWS,
        TOGETHER=planes_together(launch, weight.group_size),
        EVEN_N=num_columns % launch.block_n == 0,
        EVEN_K=width % RUN == 0,
        EVICT="evict_first" if num_rows <= launch.block_m else "",
        ASM=x.dtype != torch.float32 and not interpreted(),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=pdl,
    )
