"""Linear layers with NF4 weights (4-bit codes of a table, a scale per block of columns) and 16-bit activations."""

from __future__ import annotations

from functools import partial

import torch
import triton
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
from infermix_kernels.matmul import new_output, rows_tile
from infermix_kernels.matmul_launch import (
    ExpandLaunch,
    GemvLaunch,
    MatmulLaunch,
    MatmulWorkspace,
    check_matrix,
    launch_for_fp32,
    split_for,
    usable_split,
)
from infermix_kernels.nf4_dequantize import dequantize
from infermix_kernels.nf4_gemv import nf4_gemv_kernel
from infermix_kernels.nf4_pack import PackedNf4
from infermix_kernels.nf4_tile import nf4_tile_kernel
from infermix_kernels.pack import PLANE, RUN
from infermix_kernels.w4a16 import planes_together
from infermix_kernels.w4a16_dequantize import expanded_product

#: With more rows, every weight would be looked up in several tiles; expanding all of them once costs less.
MAX_TILED_ROWS = 64
#: Rows that are multiplied one by one where blocks are too small for the tensor cores.
MAX_SINGLE_ROWS = 4
#: As many programs of one warp fill a large device; fewer features are spread over more warps each.
_MANY_FEATURES = 4096
_PROGRAMS = 384


def nf4_linear(
    x: Tensor,
    weight: PackedNf4,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    workspace: MatmulWorkspace | None = None,
    room: Tensor | None = None,
    launch: GemvLaunch | MatmulLaunch | ExpandLaunch | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x [M, K] weight^T + bias [N]`, in x's dtype, summed in fp32.

    One row is multiplied by values in fp32; up to MAX_TILED_ROWS rows meet the table rounded to x's dtype on the
    tensor cores, and the sums of blocks are scaled in fp32; more rows are multiplied by weights that were expanded to
    x's dtype before, in pieces that fit into `room` (see `expanded_product`). `launch` overrides that choice.
    """
    _check(x, weight, bias)
    out = new_output(x, weight.out_features, x.dtype, out)
    require_shape("out", out, (x.shape[0], weight.out_features))
    require_rows("out", out)
    require_device(x, out)
    if x.shape[0] == 0:
        return out
    if launch is None:
        launch = default_launch(x.shape[0], weight, x.dtype)
    if isinstance(launch, GemvLaunch):
        _rows(x, weight, bias, out, launch, pdl)
    elif isinstance(launch, MatmulLaunch):
        _tiles(x, weight, bias, out, launch, workspace, pdl)
    else:
        expanded_product(x, weight.out_features, partial(dequantize, weight), bias, out, room)
    return out


def default_launch(
    num_rows: int, weight: PackedNf4, dtype: torch.dtype = torch.bfloat16
) -> GemvLaunch | MatmulLaunch | ExpandLaunch:
    """By reasoning, not measured: one output feature a program leaves x and words where they were loaded.

    With several, compilers differ in what they send through shared memory on the way.
    """
    if num_rows == 1 or (num_rows <= MAX_SINGLE_ROWS and not tiled(weight.block_size)):
        num_warps = 1 if weight.out_features >= _MANY_FEATURES else 4
        return GemvLaunch(1, 4 * RUN * num_warps, num_warps)
    if num_rows > MAX_TILED_ROWS or not tiled(weight.block_size):
        return ExpandLaunch()
    launch = tile_launch(num_rows, weight.out_features, weight.in_features)
    return launch_for_fp32(launch, RUN) if dtype == torch.float32 else launch


def tile_launch(num_rows: int, num_columns: int, width: int) -> MatmulLaunch:
    """Up to MAX_TILED_ROWS rows. Looking up takes the registers that more stages would need.

    At least 16 rows a tile: with 8, the assembler spills.
    """
    split = split_for(triton.cdiv(num_columns, 64), triton.cdiv(width, RUN), _PROGRAMS)
    block_m = max(16, rows_tile(num_rows, MAX_TILED_ROWS))
    return MatmulLaunch(block_m, 64, RUN, split, 4, 3 if block_m == 16 else 2, planes=2)


def tiled(block_size: int) -> bool:
    """Whether blocks are whole planes of columns, of which the tensor cores take one at least."""
    return block_size >= PLANE


def described(block_size: int) -> str:
    """What multiplies, for records."""
    one_by_one = "triton nf4" if tiled(block_size) else "triton nf4 gemv"
    most = MAX_TILED_ROWS if tiled(block_size) else MAX_SINGLE_ROWS
    return f"{one_by_one}, above {most} rows dequantize (triton) + matmul"


def _check(x: Tensor, weight: PackedNf4, bias: Tensor | None) -> None:
    require_floats(x=x)
    check_matrix(x, weight.out_features, weight.in_features)
    require(weight.words.dtype == torch.int32, f"words are {weight.words.dtype}, must be int32")
    num_words = -(-weight.in_features // RUN) * PLANE
    require_shape("words", weight.words, (weight.out_features, num_words))
    require(weight.words.is_contiguous(), "words must be contiguous")
    require_vector("bias", bias, weight.out_features)
    require_device(x, weight.words, weight.absmax, weight.absmax_scale, weight.absmax_mean, bias, *weight.tables)


def _scale_tensors(weight: PackedNf4) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels take; fp32 scales have none of their own."""
    absmax = weight.absmax
    return (
        absmax,
        absmax if weight.absmax_scale is None else weight.absmax_scale,
        absmax if weight.absmax_mean is None else weight.absmax_mean,
    )


def _rows(x: Tensor, weight: PackedNf4, bias: Tensor | None, out: Tensor, launch: GemvLaunch, pdl: bool) -> None:
    """`launch.block_k` columns a step: whole runs, a power of two of them."""
    require(launch.block_k % RUN == 0, f"block_k is {launch.block_k}, must be a multiple of {RUN}")
    chunk = min(PLANE, weight.block_size)
    nf4_gemv_kernel[(triton.cdiv(weight.out_features, launch.block_n), x.shape[0])](
        x,
        weight.words,
        *_scale_tensors(weight),
        weight.tables[0],
        out if bias is None else bias,
        out,
        weight.out_features,
        weight.in_features,
        weight.blocks,
        x.stride(0),
        weight.words.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        BLOCK=weight.block_size,
        SCALE_BLOCK=weight.scale_block,
        BLOCK_N=launch.block_n,
        CHUNKS=launch.block_k // (8 * chunk),
        CHUNK=chunk,
        ASM=not interpreted(),
        PDL=pdl,
        num_warps=launch.num_warps,
        launch_pdl=pdl,
    )


def _tiles(
    x: Tensor,
    weight: PackedNf4,
    bias: Tensor | None,
    out: Tensor,
    launch: MatmulLaunch,
    workspace: MatmulWorkspace | None,
    pdl: bool,
) -> None:
    num_rows, width = x.shape
    num_columns = weight.out_features
    require(tiled(weight.block_size), f"blocks of {weight.block_size}; tiles need blocks of {PLANE} columns or more")
    require(launch.block_k == RUN and launch.swap, f"4-bit weights need swapped launches with block_k {RUN}")
    split_k = usable_split(launch, workspace, num_rows, num_columns)
    nf4_tile_kernel[(launch.num_tiles(num_rows, num_columns) * split_k,)](
        x,
        weight.words,
        *_scale_tensors(weight),
        weight.table(x.dtype),
        out,
        out if bias is None else bias,
        out if workspace is None else workspace.partial,
        out if workspace is None else workspace.counters,
        num_rows,
        num_columns,
        width,
        weight.blocks,
        x.stride(0),
        weight.words.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        BLOCK=weight.block_size,
        SCALE_BLOCK=weight.scale_block,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        SPLIT_K=split_k,
        GROUP_M=launch.group_m,
        TOGETHER=planes_together(launch, weight.block_size),
        EVEN_N=num_columns % launch.block_n == 0,
        EVEN_K=width % RUN == 0,
        EVICT="evict_first" if num_rows <= launch.block_m else "",
        ASM=not interpreted(),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=pdl,
    )
