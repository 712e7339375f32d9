"""What the matrix products mean, in plain PyTorch: weights dequantized, sums in fp32 (fp64 for fp64 input)."""

from __future__ import annotations

import torch
from torch import Tensor

from infermix_kernels.pack import PackedW4
from infermix_kernels.reference.ops import quantize_rows, wide


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [M, K] weight [N, K]^T + bias [N]`, in x's dtype."""
    result = wide(x) @ weight.to(wide(x).dtype).t()
    return (result if bias is None else result + bias).to(x.dtype)


def w4a16_linear(x: Tensor, weight: PackedW4, bias: Tensor | None = None) -> Tensor:
    return linear(x, weight.dequantize(wide(x).dtype), bias)


def w8a16_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`weight [N, K]` int8 or FP8, `weight_scale [N]` or `[groups, N]`."""
    return linear(x, scaled_weight(weight, weight_scale, wide(x).dtype), bias)


def scaled_weight(weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    scale = weight_scale.to(dtype)
    if scale.dim() == 1:
        return weight.to(dtype) * scale[:, None]
    return weight.to(dtype) * scale.t().repeat_interleave(weight.shape[1] // scale.shape[0], dim=1)


def quantized_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` rounded per token to the weight's dtype (int8 or FP8), then the product of what both stand for."""
    numbers, scales = quantize_rows(x, weight.dtype)
    exact = (numbers.double() * scales.double()[:, None]) @ (weight.double() * weight_scale.double()[:, None]).t()
    return (exact if bias is None else exact + bias).to(x.dtype)
