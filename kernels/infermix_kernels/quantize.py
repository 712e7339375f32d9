"""Quantizing activations per token: the largest magnitude of a row becomes the largest number of the dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import require, require_device, require_floats, require_rows, require_vector, warps_for
from infermix_kernels.dependent import wait_for_inputs
from infermix_kernels.kv_write import QUANT_MAX

MAX_WIDTH = 65536
#: Adding and subtracting 1.5 * 2**23 rounds an fp32 number to the nearest integer, ties to even.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def quantize_kernel(
    x, out, scales, width, stride_x, stride_out, LARGEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    values = tl.load(x + row * stride_x + cols, mask=cols < width, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(values), axis=0)
    scaled = values * tl.where(amax > 0.0, LARGEST / tl.where(amax > 0.0, amax, 1.0), 0.0)
    scaled = (scaled + _ROUNDER) - _ROUNDER if LARGEST == 127.0 else tl.clamp(scaled, -LARGEST, LARGEST)
    tl.store(scales + row, amax * (1.0 / LARGEST))
    tl.store(out + row * stride_out + cols, scaled.to(out.dtype.element_ty), mask=cols < width)


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """`x [M, K]` -> (numbers of `dtype`, int8 or float8_e4m3fn, `[M, K]`; fp32 scales `[M]`); number * scale is x."""
    require(dtype in QUANT_MAX, f"dtype is {dtype}, must be int8 or float8_e4m3fn")
    require_floats(x=x)
    require_rows("x", x)
    num_rows, width = x.shape
    require(width <= MAX_WIDTH, f"rows of {width} elements; at most {MAX_WIDTH} are supported")
    if out is None:
        out = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    if scales is None:
        scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    require(out.dtype == dtype and out.shape == x.shape, f"out must be {dtype} {list(x.shape)}")
    require_rows("out", out)
    require(scales.dtype == torch.float32, f"scales are {scales.dtype}, must be float32")
    require_vector("scales", scales, num_rows)
    require_device(x, out, scales)
    if x.numel() == 0:
        return out, scales
    block = triton.next_power_of_2(width)
    quantize_kernel[(num_rows,)](
        x,
        out,
        scales,
        width,
        x.stride(0),
        out.stride(0),
        LARGEST=QUANT_MAX[dtype],
        BLOCK=block,
        PDL=pdl,
        num_warps=warps_for(block, 16 if num_rows >= 256 else 8),
        launch_pdl=pdl,
    )
    return out, scales
