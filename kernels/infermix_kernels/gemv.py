"""Linear layers of few rows in 16 or 32 bits: reading the weights once, at the speed of memory.

Several weights that share an input (q, k and v; gate and up) are one product over their concatenation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import require, require_device, require_floats, require_rows, require_vector
from infermix_kernels.dependent import wait_for_inputs
from infermix_kernels.matmul import measured_launch, new_output, product, rows_tile
from infermix_kernels.matmul_launch import (
    GemvLaunch,
    MatmulLaunch,
    MatmulWorkspace,
    check_matrix,
    launch_for_fp32,
    split_for,
)
from infermix_kernels.matmul_table import LinearShape, MatmulTable

__all__ = ["MAX_ROWS", "GemvLaunch", "default_launch", "gemv_kernel", "skinny_linear"]

#: More rows than this are better left to a general matrix product.
MAX_ROWS = 16
#: Programs that keep a large device busy.
_PROGRAMS = 256


@triton.jit
def gemv_kernel(
    x,
    w,
    bias,
    out,
    N,
    K,
    stride_w,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x. The first weights are read before the kernel waits for x."""
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    w_at = w + features.to(tl.int64)[:, None] * stride_w + ks[None, :]
    if EVEN_N and EVEN_K:
        weights = tl.load(w_at, eviction_policy="evict_first")
    else:
        mask = (features < N)[:, None] & (ks < K)[None, :]
        weights = tl.load(w_at, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    acc = weights.to(tl.float32) * tl.load(x + ks, mask=ks < K, other=0.0).to(tl.float32)[None, :]
    for start in range(BLOCK_K, K, BLOCK_K):
        if EVEN_N and EVEN_K:
            weights = tl.load(w_at + start, eviction_policy="evict_first")
            xs = tl.load(x + start + ks)
        else:
            mask = (features < N)[:, None] & (start + ks < K)[None, :]
            weights = tl.load(w_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
            xs = tl.load(x + start + ks, mask=start + ks < K, other=0.0)
        acc += weights.to(tl.float32) * xs.to(tl.float32)[None, :]
    result = tl.sum(acc, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + features, mask=features < N, other=0.0).to(tl.float32)
    tl.store(out + features, result.to(out.dtype.element_ty), mask=features < N)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    workspace: MatmulWorkspace | None = None,
    launch: GemvLaunch | MatmulLaunch | None = None,
    launches: MatmulTable | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x [M, K] weight [N, K]^T + bias [N]` for 1 to 16 rows, in one dtype, summed in fp32.

    With a `workspace`, narrow weights are split over more programs. `launches` holds measured launch parameters,
    `launch` overrides them. `pdl`: see `infermix_kernels.dependent`.
    """
    require(x.dim() == 2 and 1 <= x.shape[0] <= MAX_ROWS, f"x has shape {list(x.shape)}; 1 to {MAX_ROWS} rows fit")
    require_floats(x=x, weight=weight)
    out = new_output(x, weight.shape[0], x.dtype, out)
    if launch is None:
        launch = _launch(x, weight, launches)
    if isinstance(launch, MatmulLaunch):
        product(x, weight, out, launch, bias=bias, workspace=workspace, pdl=pdl)
    else:
        _gemv(x, weight, bias, out, launch, pdl)
    return out


def _launch(x: Tensor, weight: Tensor, launches: MatmulTable | None) -> GemvLaunch | MatmulLaunch:
    shape = LinearShape("skinny", weight.shape[0], weight.shape[1], element_bytes=x.element_size())
    found = measured_launch(launches, shape, x, weight)
    if isinstance(found, GemvLaunch | MatmulLaunch):
        return found
    launch = default_launch(x.shape[0], weight.shape[0], weight.shape[1])
    if x.dtype == torch.float32 and isinstance(launch, MatmulLaunch):
        return launch_for_fp32(launch)
    return launch


def default_launch(num_rows: int, num_columns: int, width: int) -> GemvLaunch | MatmulLaunch:
    """What was best on an H200 for the four linears of an 8B layer."""
    if num_rows == 1:
        most = 2048 if width % 2048 == 0 and width <= 8192 else 1024
        return GemvLaunch(block_k=min(most, triton.next_power_of_2(width)))
    block_m = rows_tile(num_rows, MAX_ROWS)
    if num_columns >= 6144:
        return MatmulLaunch(8, 32, 128, 1, 2, 5) if block_m == 8 else MatmulLaunch(block_m, 64, 128, 1, 4, 5)
    split = split_for(triton.cdiv(num_columns, 64), triton.cdiv(width, 128), _PROGRAMS, most=2)
    return MatmulLaunch(block_m, 64, 128, split, 4, 5)


def _gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, launch: GemvLaunch, pdl: bool) -> None:
    num_columns, width = weight.shape
    require(x.shape[0] == 1, f"a GemvLaunch takes one row, not {x.shape[0]}")
    require_rows("weight", weight)
    check_matrix(x, num_columns, width)
    require(tuple(out.shape) == (1, num_columns), f"out has shape {list(out.shape)}, must be [1, {num_columns}]")
    require_rows("out", out)
    require_vector("bias", bias, num_columns)
    require_device(x, weight, bias, out)
    gemv_kernel[(triton.cdiv(num_columns, launch.block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_columns,
        width,
        weight.stride(0),
        HAS_BIAS=bias is not None,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        EVEN_N=num_columns % launch.block_n == 0,
        EVEN_K=width % launch.block_k == 0,
        PDL=pdl,
        num_warps=launch.num_warps,
        launch_pdl=pdl,
    )
