"""Linear layers with 8-bit weights (int8, or float8_e4m3fn) and 16-bit activations."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from infermix_kernels.checks import require, require_floats
from infermix_kernels.matmul import measured_launch, new_output, product, rows_tile
from infermix_kernels.matmul_launch import MatmulLaunch, MatmulWorkspace, launch_for_fp32, split_for
from infermix_kernels.matmul_table import LinearShape, MatmulTable

DTYPES = (torch.int8, torch.float8_e4m3fn)
_PROGRAMS = 384


def w8a16_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    workspace: MatmulWorkspace | None = None,
    launch: MatmulLaunch | None = None,
    launches: MatmulTable | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x [M, K] (weight [N, K] * weight_scale)^T + bias [N]`, in x's dtype.

    `weight_scale` is `[N]`, or `[groups, N]` for equal groups of at least 32 columns. Weights are converted to x's
    dtype without loss and scaled after the product. `launches` holds measured launch parameters.
    """
    require_floats(x=x)
    require(weight.dtype in DTYPES, f"weight is {weight.dtype}, must be int8 or float8_e4m3fn")
    group = group_size(weight, weight_scale)
    require(group % 32 == 0 or group == weight.shape[1], f"groups of {group} columns, must be a multiple of 32")
    out = new_output(x, weight.shape[0], x.dtype, out)
    if launch is None:
        launch = _launch(x, weight, group, launches)
    product(x, weight, out, launch, weight_scale=weight_scale, bias=bias, workspace=workspace, pdl=pdl)
    return out


def _launch(x: Tensor, weight: Tensor, group: int, launches: MatmulTable | None) -> MatmulLaunch:
    num_columns, width = weight.shape
    grouped = 0 if group == width else group
    shape = LinearShape("w8a16", num_columns, width, group_size=grouped, element_bytes=x.element_size())
    found = measured_launch(launches, shape, x, weight)
    if isinstance(found, MatmulLaunch):
        return found
    launch = default_launch(x.shape[0], weight.shape[0], weight.shape[1], group)
    return launch_for_fp32(launch) if x.dtype == torch.float32 else launch


def group_size(weight: Tensor, weight_scale: Tensor) -> int:
    """Columns that share a scale; all of them when there is one scale per output feature."""
    return weight.shape[1] // weight_scale.shape[0] if weight_scale.dim() == 2 else weight.shape[1]


def default_launch(num_rows: int, num_columns: int, width: int, group: int) -> MatmulLaunch:
    """What was good on an H200; block_k divides the group."""
    block_k = next((size for size in (128, 64, 32) if group == width or group % size == 0), group)
    if num_rows > 128:
        return MatmulLaunch(128, 128, min(block_k, 64), 1, 8, 3)
    block_m = max(16, rows_tile(num_rows, 128))
    block_n = 64 if block_m <= 32 else 128
    num_tiles = triton.cdiv(num_columns, block_n)
    split = split_for(num_tiles, triton.cdiv(width, block_k), _PROGRAMS)
    return MatmulLaunch(block_m, block_n, block_k, split, 4, 4)
