"""Products of many rows: tiles fetched by the tensor memory accelerator, programs that stay for several tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from infermix_kernels.checks import require
from infermix_kernels.dependent import wait_for_inputs
from infermix_kernels.matmul_launch import MatmulLaunch
from infermix_kernels.matmul_tile import multiply, store_product, tile_of


@triton.jit
def descriptor_kernel(
    x,
    w,
    out,
    x_scale,
    w_scale,
    bias,
    M,
    N,
    K,
    stride_out,
    HAS_X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTEGERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """`x [M, K] w [N, K]^T`, both in one dtype. Grid: any number of programs, which share the tiles.

    Descriptors read zeros beyond the edges of a matrix.
    """
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    SUM: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    wait_for_inputs(PDL)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros([BLOCK_M, BLOCK_N], SUM)
        for step in range(tl.cdiv(K, BLOCK_K)):
            xs = x.load([tile_m * BLOCK_M, step * BLOCK_K])
            ws = w.load([tile_n * BLOCK_N, step * BLOCK_K])
            acc = multiply(xs, ws, acc, False, PRECISION)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        store_product(
            acc, out, x_scale, w_scale, bias, rows, columns, M, N, stride_out, HAS_X_SCALE, W_SCALE, HAS_BIAS
        )


def fits_descriptors(*matrices: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes, as descriptors need."""
    return all(
        matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.stride(1) == 1
        for matrix in matrices
    )


def descriptor_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    launch: MatmulLaunch,
    *,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    num_programs: int,
    pdl: bool,
) -> None:
    """As `matmul.product`, which has checked the arguments; scales per channel only."""
    require(x.dtype == weight.dtype, f"x is {x.dtype}, weight {weight.dtype}: descriptors need one dtype")
    require(fits_descriptors(x, weight), "rows of x and weight must start at multiples of 16 bytes")
    num_rows, width = x.shape
    num_columns = weight.shape[0]
    grid = min(launch.num_tiles(num_rows, num_columns), num_programs)
    descriptor_kernel[(grid,)](
        TensorDescriptor.from_tensor(x, [launch.block_m, launch.block_k]),
        TensorDescriptor.from_tensor(weight, [launch.block_n, launch.block_k]),
        out,
        out if x_scale is None else x_scale,
        out if weight_scale is None else weight_scale,
        out if bias is None else bias,
        num_rows,
        num_columns,
        width,
        out.stride(0),
        HAS_X_SCALE=x_scale is not None,
        W_SCALE=0 if weight_scale is None else 1,
        HAS_BIAS=bias is not None,
        INTEGERS=x.dtype == torch.int8,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        GROUP_M=launch.group_m,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=pdl,
    )
