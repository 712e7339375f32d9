"""RMSNorm and LayerNorm, alone or fused with the addition of the residual."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import (
    outer_inner,
    output_like,
    require,
    require_device,
    require_floats,
    require_rows,
    require_shape,
    require_vector,
    warps_for,
)
from infermix_kernels.dependent import wait_for_inputs

MAX_WIDTH = 65536
#: Below this many rows the latency of one row counts, not the throughput of all.
_FEW_ROWS = 512


@triton.jit
def row_offsets(rows, inner, stride_outer, stride_inner):
    return (rows // inner).to(tl.int64) * stride_outer + (rows % inner) * stride_inner


@triton.jit
def norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    residual_out,
    num_rows,
    inner,
    x_outer,
    x_inner,
    res_outer,
    res_inner,
    out_outer,
    out_inner,
    new_outer,
    new_inner,
    eps,
    weight_offset,
    WIDTH: tl.constexpr,
    RMS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: tiles of ROWS rows. Row r lies at `r // inner * outer + r % inner * inner_stride`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    mask = (rows < num_rows)[:, None] & inside[None, :]
    scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + weight_offset
    if HAS_BIAS:
        shift = tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    values = tl.load(
        x + row_offsets(rows, inner, x_outer, x_inner)[:, None] + cols[None, :], mask=mask, other=0.0
    ).to(tl.float32)
    if HAS_RESIDUAL:
        before = tl.load(
            residual + row_offsets(rows, inner, res_outer, res_inner)[:, None] + cols[None, :], mask=mask, other=0.0
        ).to(tl.float32)
        stored = (values + before).to(residual_out.dtype.element_ty)
        tl.store(
            residual_out + row_offsets(rows, inner, new_outer, new_inner)[:, None] + cols[None, :], stored, mask=mask
        )
        values = stored.to(tl.float32)
    if not RMS:
        mean = tl.sum(values, axis=1) / WIDTH
        values = tl.where(inside[None, :], values - mean[:, None], 0.0)
    variance = tl.sum(values * values, axis=1) / WIDTH
    result = values * (1.0 / tl.sqrt(variance + eps))[:, None] * scale[None, :]
    if HAS_BIAS:
        result = result + shift[None, :]
    tl.store(
        out + row_offsets(rows, inner, out_outer, out_inner)[:, None] + cols[None, :],
        result.to(out.dtype.element_ty),
        mask=mask,
    )


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x / rms(x) * (weight + weight_offset)` over the last dimension, computed in fp32.

    `x [T, N]` or `[T, H, N]` (any strides but the last), `weight [N]`; Gemma has `weight_offset=1`. `out` may be `x`.
    """
    out = output_like("out", out, tuple(x.shape), x)
    _launch(x, None, weight, None, eps, weight_offset, out, None, rms=True, pdl=pdl)
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """(norm of the new residual, the new residual `x + residual`, rounded to its dtype before it is normed).

    `out` may be `x`, `residual_out` may be `residual`.
    """
    out = output_like("out", out, tuple(x.shape), x)
    residual_out = output_like("residual_out", residual_out, tuple(x.shape), x)
    _launch(x, residual, weight, None, eps, weight_offset, out, residual_out, rms=True, pdl=pdl)
    return out, residual_out


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None, pdl: bool = False
) -> Tensor:
    """`(x - mean) / std * weight + bias` over the last dimension, computed in fp32; shapes as in `rms_norm`."""
    out = output_like("out", out, tuple(x.shape), x)
    _launch(x, None, weight, bias, eps, 0.0, out, None, rms=False, pdl=pdl)
    return out


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `add_rms_norm`, with LayerNorm."""
    out = output_like("out", out, tuple(x.shape), x)
    residual_out = output_like("residual_out", residual_out, tuple(x.shape), x)
    _launch(x, residual, weight, bias, eps, 0.0, out, residual_out, rms=False, pdl=pdl)
    return out, residual_out


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    out: Tensor,
    residual_out: Tensor | None,
    *,
    rms: bool,
    pdl: bool,
) -> None:
    _check(x, residual, weight, bias)
    width = x.shape[-1]
    num_rows = x.numel() // width if width else 0
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    rows = max(1, 1024 // block) if num_rows >= _FEW_ROWS else 1
    before, new = (x if residual is None else residual), (out if residual_out is None else residual_out)
    norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        before,
        weight,
        weight if bias is None else bias,
        out,
        new,
        num_rows,
        1 if x.dim() == 2 else x.shape[1],
        *outer_inner(x),
        *outer_inner(before),
        *outer_inner(out),
        *outer_inner(new),
        eps,
        weight_offset,
        WIDTH=width,
        RMS=rms,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        ROWS=rows,
        BLOCK=block,
        PDL=pdl,
        num_warps=warps_for(rows * block, 16 if num_rows >= _FEW_ROWS else 8),
        launch_pdl=pdl,
    )


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> None:
    require_floats(x=x)
    require_rows("x", x, (2, 3))
    width = x.shape[-1]
    require(width <= MAX_WIDTH, f"rows of {width} elements; at most {MAX_WIDTH} are supported")
    if residual is not None:
        require_floats(x=x, residual=residual)
        require_shape("residual", residual, tuple(x.shape))
        require_rows("residual", residual, (x.dim(),))
    require_vector("weight", weight, width)
    require_vector("bias", bias, width)
    require_device(x, residual, weight, bias)
