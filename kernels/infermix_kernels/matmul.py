"""Host side of the tile kernel: `x w^T` for dense weights of any dtype, scaled and split as asked."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from infermix_kernels.checks import require, require_device, require_rows, require_shape, require_vector
from infermix_kernels.launch import num_multiprocessors
from infermix_kernels.matmul_descriptor import descriptor_product, fits_descriptors
from infermix_kernels.matmul_launch import MatmulLaunch, MatmulWorkspace, check_matrix, split_for, usable_split
from infermix_kernels.matmul_table import LinearLaunch, LinearShape, MatmulTable
from infermix_kernels.matmul_tile import PER_CHANNEL, PER_GROUP, UNSCALED, product_kernel


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    launch: MatmulLaunch,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    workspace: MatmulWorkspace | None = None,
    pdl: bool = False,
) -> None:
    """`out [M, N] = (x [M, K] weight [N, K]^T) * x_scale [M] * weight_scale + bias [N]`.

    `weight_scale` is `[N]`, or `[groups, N]` for equal groups of columns. `weight` is in x's dtype, or in 8 bits
    and converted to it.
    """
    check_product(x, weight, out, x_scale, weight_scale, bias)
    num_rows, width = x.shape
    num_columns = weight.shape[0]
    if num_rows == 0:
        return
    grouped = weight_scale is not None and weight_scale.dim() == 2
    if launch.descriptors:
        require(not grouped, "scales per group need a launch without descriptors")
        scales = {"x_scale": x_scale, "weight_scale": weight_scale}
        programs = num_multiprocessors(x.device)
        descriptor_product(x, weight, out, launch, **scales, bias=bias, num_programs=programs, pdl=pdl)
        return
    group_size = width // weight_scale.shape[0] if grouped and weight_scale is not None else width
    require(group_size % launch.block_k == 0 or not grouped, f"block_k {launch.block_k}, groups of {group_size}")
    split_k = usable_split(launch, workspace, num_rows, num_columns)
    num_tiles = launch.num_tiles(num_rows, num_columns)
    product_kernel[(num_tiles * split_k,)](
        x,
        weight,
        out,
        out if x_scale is None else x_scale,
        out if weight_scale is None else weight_scale,
        out if bias is None else bias,
        out if workspace is None else workspace.partial,
        out if workspace is None else workspace.counters,
        num_rows,
        num_columns,
        width,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        HAS_X_SCALE=x_scale is not None,
        W_SCALE=(UNSCALED if weight_scale is None else PER_GROUP if grouped else PER_CHANNEL).value,
        HAS_BIAS=bias is not None,
        GROUP_SIZE=group_size,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        SPLIT_K=split_k,
        GROUP_M=launch.group_m,
        SWAP=launch.swap,
        EVEN_N=num_columns % launch.block_n == 0,
        EVEN_K=width % launch.block_k == 0,
        EVICT="evict_first" if num_rows <= launch.block_m else "",
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=pdl,
    )


def check_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    bias: Tensor | None,
) -> None:
    require_rows("weight", weight)
    num_columns, width = weight.shape
    check_matrix(x, num_columns, width)
    require_shape("out", out, (x.shape[0], num_columns))
    require_rows("out", out)
    require_vector("x_scale", x_scale, x.shape[0])
    require_vector("bias", bias, num_columns)
    if weight_scale is not None and weight_scale.dim() == 2:
        groups = weight_scale.shape[0]
        require(groups > 0 and width % groups == 0, f"{groups} groups do not divide {width} columns")
        require_shape("weight_scale", weight_scale, (groups, num_columns))
        require(weight_scale.is_contiguous(), "weight_scale must be contiguous")
    else:
        require_vector("weight_scale", weight_scale, num_columns)
    require_device(x, weight, out, x_scale, weight_scale, bias)


def new_output(x: Tensor, num_columns: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """The preallocated output, whose dtype is checked, or a new one."""
    if out is None:
        return torch.empty(x.shape[0], num_columns, dtype=dtype, device=x.device)
    require(out.dtype == dtype, f"out is {out.dtype}, must be {dtype}")
    return out


def measured_launch(
    launches: MatmulTable | None, shape: LinearShape, x: Tensor, weight: Tensor
) -> LinearLaunch | None:
    """What was measured for such a linear and so many rows, where these tensors allow it."""
    found = None if launches is None else launches.find(shape, x.shape[0])
    if isinstance(found, MatmulLaunch) and found.descriptors and not fits_descriptors(x, weight):
        return None
    return found


def rows_tile(num_rows: int, most: int) -> int:
    """The smallest power of two from 8 up that holds the rows, at most `most`."""
    return min(max(8, triton.next_power_of_2(num_rows)), most)


def byte_launch(num_rows: int, num_columns: int, width: int, programs: int) -> MatmulLaunch:
    """Tiles of up to 64 rows of 8-bit numbers that were best on an H200 for the four linears of an 8B layer."""
    block_m = rows_tile(num_rows, 64)
    split = split_for(triton.cdiv(num_columns, 64), triton.cdiv(width, 256), programs)
    if block_m > 16:
        if num_columns >= 16384:
            return MatmulLaunch(block_m, 64, 128, 1, 4, 3)
        return MatmulLaunch(block_m, 64, 256, 1 if num_columns >= 6144 else min(split, 2), 4, 5)
    if num_columns >= 16384:
        return MatmulLaunch(block_m, 64, 256, 1, 4, 4)
    return (
        MatmulLaunch(block_m, 32, 256, 1, 2, 5)
        if num_columns >= 6144
        else MatmulLaunch(block_m, 64, 256, split, 4, 3)
    )
