"""Linears with int8 weights, a scale per output, that a CPU multiplies without expanding them for few rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Weights are expanded from here on: one product then costs less than as many rows one after another. Measured on two
#: cores with AVX-512, 576 x 1,536 weights: 34 us for a row (bf16 weights 85 to 150), about 25 for each further one,
#: some 350 for expanding them and multiplying.
EXPANDED_FROM = 16

#: The operator reads past the end of rows that are no whole number of vectors (torch 2.13: wrong sums, crashes).
_VECTOR = 32


def multiplies_rows(dtype: torch.dtype, device: str, in_features: int) -> bool:
    """Whether torch has a product that beats 16-bit weights: on CPUs, in bf16 (its fp32 product is much slower)."""
    return device == "cpu" and dtype == torch.bfloat16 and in_features % _VECTOR == 0


class Int8RowsLinear(nn.Module):
    """`w = q * scale`: `weight [out, in]` int8, `scale [out]` bf16, activations stay in bf16.

    Sums are fp32 and rounded once. Below `EXPANDED_FROM` rows, a row has the same bits whatever the others are.
    """

    kernel = f"torch int8 weights x bf16 below {EXPANDED_FROM} rows, dequantize+matmul otherwise"
    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight.contiguous())
        self.register_buffer("scale", scale.contiguous())
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def num_bytes(self) -> int:
        """Integers and scales."""
        return self.weight.numel() + self.scale.numel() * self.scale.element_size()

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """`[out, in]`."""
        weight = self.weight.to(dtype)
        weight *= self.scale.to(dtype)[:, None]
        return weight

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        if x.dtype != self.scale.dtype or not 0 < len(rows) < EXPANDED_FROM:
            return F.linear(x, self.dequantize(x.dtype), self.bias)
        out = torch._weight_int8pack_mm(rows, self.weight, self.scale).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kernel={self.kernel}"
