"""Linear layers with int8 weights and int8 activations, quantized per token on the way in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import interpreted, require, require_floats
from infermix_kernels.dependent import wait_for_inputs
from infermix_kernels.matmul import byte_launch, check_product, measured_launch, new_output, product
from infermix_kernels.matmul_launch import DotLaunch, MatmulLaunch, MatmulWorkspace, RowLaunch
from infermix_kernels.matmul_table import LinearShape, MatmulTable
from infermix_kernels.quantize import quantize_rows
from infermix_kernels.w8a8_row import dot_bytes, row_linear, takes_row

__all__ = ["DotLaunch", "default_launch", "int8_gemv_kernel", "int8_product", "w8a8_linear"]

_PROGRAMS = 384


@triton.jit
def int8_gemv_kernel(
    x,
    w,
    out,
    x_scale,
    w_scale,
    bias,
    N,
    num_words,
    stride_w,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x. `x` and `w` are read as int32 words of four columns."""
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    w_at = w + features.to(tl.int64)[:, None] * stride_w + ks[None, :]
    if EVEN:
        weights = tl.load(w_at, eviction_policy="evict_first")
    else:
        weights = tl.load(w_at, mask=(features < N)[:, None] & (ks < num_words)[None, :], other=0)
    wait_for_inputs(PDL)
    xs = tl.load(x + ks, mask=ks < num_words, other=0)
    acc = dot_bytes(weights, tl.broadcast_to(xs[None, :], [BLOCK_N, BLOCK_K]), tl.zeros_like(weights), ASM)
    for start in range(BLOCK_K, num_words, BLOCK_K):
        inside = start + ks < num_words
        if EVEN:
            weights = tl.load(w_at + start, eviction_policy="evict_first")
        else:
            weights = tl.load(w_at + start, mask=(features < N)[:, None] & inside[None, :], other=0)
        xs = tl.load(x + start + ks, mask=inside, other=0)
        acc = dot_bytes(weights, tl.broadcast_to(xs[None, :], [BLOCK_N, BLOCK_K]), acc, ASM)
    result = tl.sum(acc, axis=1).to(tl.float32) * tl.load(x_scale)
    result = result * tl.load(w_scale + features, mask=features < N, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + features, mask=features < N, other=0.0).to(tl.float32)
    tl.store(out + features, result.to(out.dtype.element_ty), mask=features < N)


def w8a8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
    workspace: MatmulWorkspace | None = None,
    launch: MatmulLaunch | DotLaunch | RowLaunch | None = None,
    launches: MatmulTable | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x [M, K] (weight [N, K] int8 * weight_scale [N])^T + bias`, in x's dtype, with x rounded to int8 per token.

    `scratch` is room for the quantized x: (int8 `[M, K]`, fp32 `[M]`); a `RowLaunch` needs none. Products are summed
    exactly, in int32. `launches` holds measured launch parameters, `launch` overrides them.
    """
    require_floats(x=x)
    require(weight.dtype == torch.int8, f"weight is {weight.dtype}, must be int8")
    require(weight_scale.dim() == 1, "weight_scale must be [N]")
    out = new_output(x, weight.shape[0], x.dtype, out)
    check_product(x, weight, out, None, weight_scale, bias)
    if x.shape[0] and launch is None:
        launch = _launch(x, weight, launches)
    if isinstance(launch, RowLaunch):
        row_linear(x, weight, weight_scale, bias, out, launch, pdl=pdl)
        return out
    quantized, x_scale = quantize_rows(
        x, torch.int8, out=scratch and scratch[0], scales=scratch and scratch[1], pdl=pdl
    )
    int8_product(quantized, x_scale, weight, weight_scale, bias, out=out, workspace=workspace, launch=launch, pdl=pdl)
    return out


def int8_product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    workspace: MatmulWorkspace | None = None,
    launch: MatmulLaunch | DotLaunch | None = None,
    pdl: bool = False,
) -> Tensor:
    """The same from an x that is already int8 `[M, K]` with fp32 scales `[M]`."""
    require(x.dtype == torch.int8, f"x is {x.dtype}, must be int8")
    require(weight.dtype == torch.int8, f"weight is {weight.dtype}, must be int8")
    require(weight.shape[1] <= 1 << 17, f"{weight.shape[1]} columns; sums of at most {1 << 17} fit into int32")
    launch = launch or default_launch(x.shape[0], weight.shape[0], weight.shape[1])
    if isinstance(launch, MatmulLaunch):
        scales = {"x_scale": x_scale, "weight_scale": weight_scale}
        product(x, weight, out, launch, **scales, bias=bias, workspace=workspace, pdl=pdl)
    else:
        _gemv(x, x_scale, weight, weight_scale, bias, out, launch, pdl)
    return out


def _launch(x: Tensor, weight: Tensor, launches: MatmulTable | None) -> MatmulLaunch | DotLaunch | RowLaunch | None:
    """What was measured, `None` where the defaults hold."""
    shape = LinearShape("int8", weight.shape[0], weight.shape[1], element_bytes=x.element_size())
    found = measured_launch(launches, shape, x, weight)
    if isinstance(found, RowLaunch):
        return found if takes_row(x, weight) else None
    return found if isinstance(found, MatmulLaunch | DotLaunch) else None


def default_launch(num_rows: int, num_columns: int, width: int) -> MatmulLaunch | DotLaunch:
    """What was best on an H200 for the four linears of an 8B layer."""
    if num_rows == 1 and width % 4 == 0:
        return DotLaunch()
    if num_rows <= 64:
        return byte_launch(num_rows, num_columns, width, _PROGRAMS)
    narrow = num_columns < 6144 and width % 16 == 0
    return MatmulLaunch(128, 128, 128, 1, 8, 4 if narrow else 3, swap=False, descriptors=narrow)


def _gemv(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    launch: DotLaunch,
    pdl: bool,
) -> None:
    check_product(x, weight, out, x_scale, weight_scale, bias)
    num_columns, width = weight.shape
    require(x.shape[0] == 1, f"a DotLaunch takes one row, not {x.shape[0]}")
    words = (x.data_ptr() | weight.data_ptr() | width | weight.stride(0)) % 4 == 0
    require(words, "rows of x and weight must start at multiples of 4 bytes and be as long")
    num_words = width // 4
    block_k = min(launch.block_words, triton.next_power_of_2(num_words))
    int8_gemv_kernel[(triton.cdiv(num_columns, launch.block_n),)](
        x.view(torch.int32),
        weight.view(torch.int32),
        out,
        x_scale,
        weight_scale,
        weight_scale if bias is None else bias,
        num_columns,
        num_words,
        weight.stride(0) // 4,
        HAS_BIAS=bias is not None,
        BLOCK_N=launch.block_n,
        BLOCK_K=block_k,
        EVEN=num_columns % launch.block_n == 0 and num_words % block_k == 0,
        ASM=not interpreted(),
        PDL=pdl,
        num_warps=launch.num_warps,
        launch_pdl=pdl,
    )
