"""Softmax over rows of any length."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import output_like, require_floats, require_rows, warps_for

#: Rows up to this length are held in registers and read once.
_ONE_PASS = 16384


@triton.jit
def softmax_kernel(
    x, out, width, stride_x, stride_out, scale, BLOCK: tl.constexpr, ONE_PASS: tl.constexpr
):  # fmt: skip
    """Grid: rows. Long rows are read twice: a running maximum and sum, then the quotients."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride_x
    out += row * stride_out
    cols = tl.arange(0, BLOCK)
    if ONE_PASS:
        values = tl.load(x + cols, mask=cols < width, other=float("-inf")).to(tl.float32) * scale
        weights = tl.exp(values - tl.max(values, axis=0))
        tl.store(out + cols, (weights / tl.sum(weights, axis=0)).to(out.dtype.element_ty), mask=cols < width)
    else:
        peaks = tl.full([BLOCK], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            inside = start + cols < width
            values = tl.load(x + start + cols, mask=inside, other=float("-inf")).to(tl.float32) * scale
            new = tl.maximum(peaks, values)
            anchor = tl.where(new == float("-inf"), 0.0, new)
            sums = sums * tl.exp(peaks - anchor) + tl.exp(values - anchor)
            peaks = new
        peak = tl.max(peaks, axis=0)
        total = tl.sum(sums * tl.exp(peaks - peak), axis=0)
        for start in range(0, width, BLOCK):
            inside = start + cols < width
            values = tl.load(x + start + cols, mask=inside, other=float("-inf")).to(tl.float32) * scale
            tl.store(out + start + cols, (tl.exp(values - peak) / total).to(out.dtype.element_ty), mask=inside)


def softmax(x: Tensor, *, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """`softmax(x * scale)` over the last dimension of `x [R, N]`, computed in fp32.

    A row needs one number above minus infinity. `out` may be `x`.
    """
    require_floats(x=x)
    require_rows("x", x)
    out = output_like("out", out, tuple(x.shape), x)
    num_rows, width = x.shape
    if x.numel() == 0:
        return out
    one_pass = width <= _ONE_PASS
    block = triton.next_power_of_2(width) if one_pass else 8192
    softmax_kernel[(num_rows,)](
        x,
        out,
        width,
        x.stride(0),
        out.stride(0),
        scale,
        BLOCK=block,
        ONE_PASS=one_pass,
        num_warps=warps_for(block, 16),
    )
    return out
