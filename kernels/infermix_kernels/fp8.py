"""Linear layers with FP8 (E4M3) weights and activations, quantized per token on the way in."""

from __future__ import annotations

import torch
from torch import Tensor

from infermix_kernels.checks import require, require_floats
from infermix_kernels.matmul import byte_launch, check_product, measured_launch, new_output, product
from infermix_kernels.matmul_launch import MatmulLaunch, MatmulWorkspace, RowLaunch
from infermix_kernels.matmul_table import LinearShape, MatmulTable
from infermix_kernels.quantize import quantize_rows
from infermix_kernels.w8a8_row import row_linear, takes_row

_PROGRAMS = 384


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
    workspace: MatmulWorkspace | None = None,
    launch: MatmulLaunch | RowLaunch | None = None,
    launches: MatmulTable | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x [M, K] (weight [N, K] float8_e4m3fn * weight_scale [N])^T + bias`, in x's dtype, x rounded to FP8 per token.

    `scratch` is room for the quantized x: (float8_e4m3fn `[M, K]`, fp32 `[M]`); a `RowLaunch` needs none. Hopper's
    tensor cores add FP8 products with about 14 bits of fraction, far finer than the 4 bits of an operand. `launches`
    holds measured launch parameters, `launch` overrides them.
    """
    require_floats(x=x)
    require(weight.dtype == torch.float8_e4m3fn, f"weight is {weight.dtype}, must be float8_e4m3fn")
    require(weight_scale.dim() == 1, "weight_scale must be [N]")
    out = new_output(x, weight.shape[0], x.dtype, out)
    check_product(x, weight, out, None, weight_scale, bias)
    if x.shape[0] and launch is None:
        launch = _launch(x, weight, launches)
    if isinstance(launch, RowLaunch):
        row_linear(x, weight, weight_scale, bias, out, launch, pdl=pdl)
        return out
    quantized, x_scale = quantize_rows(
        x, torch.float8_e4m3fn, out=scratch and scratch[0], scales=scratch and scratch[1], pdl=pdl
    )
    fp8_product(quantized, x_scale, weight, weight_scale, bias, out=out, workspace=workspace, launch=launch, pdl=pdl)
    return out


def fp8_product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    workspace: MatmulWorkspace | None = None,
    launch: MatmulLaunch | None = None,
    pdl: bool = False,
) -> Tensor:
    """The same from an x that is already FP8 `[M, K]` with fp32 scales `[M]`."""
    for name, tensor in (("x", x), ("weight", weight)):
        require(tensor.dtype == torch.float8_e4m3fn, f"{name} is {tensor.dtype}, must be float8_e4m3fn")
    launch = launch or default_launch(x.shape[0], weight.shape[0], weight.shape[1])
    product(
        x, weight, out, launch, x_scale=x_scale, weight_scale=weight_scale, bias=bias, workspace=workspace, pdl=pdl
    )
    return out


def _launch(x: Tensor, weight: Tensor, launches: MatmulTable | None) -> MatmulLaunch | RowLaunch | None:
    """What was measured, `None` where the defaults hold."""
    shape = LinearShape("fp8", weight.shape[0], weight.shape[1], element_bytes=x.element_size())
    found = measured_launch(launches, shape, x, weight)
    if isinstance(found, RowLaunch):
        return found if takes_row(x, weight) else None
    return found if isinstance(found, MatmulLaunch) else None


def default_launch(num_rows: int, num_columns: int, width: int) -> MatmulLaunch:
    """What was best on an H200 for the four linears of an 8B layer."""
    if num_rows <= 64:
        return byte_launch(num_rows, num_columns, width, _PROGRAMS)
    block_n, stages = (256, 3) if num_columns >= 6144 else (128, 4)
    return MatmulLaunch(128, block_n, 128, 1, 8, stages, swap=False, descriptors=width % 16 == 0)
