"""Linears with int8 weights and int8 activations: a scale per output and per token."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from infermix_quant.linear_grouped import QuantLinear

INT8_MAX = 127

Outliers = Literal["values", "columns"]


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [..., K]` -> integers in -127 ... 127 (fp32) and the scale of every row, fp32 `[..., 1]`."""
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / INT8_MAX
    return torch.round(x.float() / scale), scale


def round_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Integers in -127 ... 127 (fp32) by a given scale; what is too large is clipped."""
    return torch.round(x.float() / scale).clamp(-INT8_MAX, INT8_MAX)


class Int8Linear(QuantLinear):
    """W8A8: activations are rounded per token on the way in (dynamic), or with one fixed scale (`input_scale`).

    On a CPU the integers meet as fp32 numbers.
    """

    kernel = "simulated int8: fp32 product of integers"
    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, input_scale: Tensor | None = None) -> None:
        """`weight [out, in]` int8, `scale [out]` fp32, `input_scale` fp32 scalar."""
        super().__init__(weight.shape[0], weight.shape[1], bias)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", input_scale)

    @property
    def activations(self) -> str:
        return "token" if self.input_scale is None else "tensor"

    def forward(self, x: Tensor) -> Tensor:
        fixed = self.input_scale
        integers, scale = quantize_rows_int8(x) if fixed is None else (round_int8(x, fixed), fixed)
        out = (F.linear(integers, self.weight.float()) * scale * self.weight_scale).to(x.dtype)
        return out if self.bias is None else out + self.bias


class LlmInt8Linear(Int8Linear):
    """LLM.int8: what goes with activations above a threshold stays out of the integers and is multiplied as it is.

    Dettmers et al., "LLM.int8()" (2022), section 3.2. Weights are int8 in both parts, as in the paper's inference
    library. What stays out are columns or single values, see `outlier_mask`.

    Here one fp32 product does both parts, as many operations as int8 alone takes.
    """

    kernel = "simulated int8: fp32 product, outliers as they are"

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, threshold: float, outliers: Outliers = "values"
    ) -> None:
        super().__init__(weight, scale, bias)
        self.threshold, self.outliers = threshold, outliers

    def forward(self, x: Tensor) -> Tensor:
        apart = outlier_mask(x, self.threshold, self.outliers)
        integers, scale = quantize_rows_int8(x.masked_fill(apart, 0))
        seen = torch.where(apart, x.float(), integers * scale)
        out = (F.linear(seen, self.weight.float()) * self.weight_scale).to(x.dtype)
        return out if self.bias is None else out + self.bias


def outlier_mask(x: Tensor, threshold: float, outliers: Outliers) -> Tensor:
    """Which values of `x [..., K]` stay out of the integers: bool, of x's shape for `values`, `[K]` for `columns`.

    `values`: those of a larger magnitude than `threshold`. `columns`, as in the paper: all of a column that has one
    in any row of this call. NaN counts as an outlier: a kernel that rounds might lose it.

    Nothing is read on the host, so that it can be captured: how many there are is not known.
    """
    large = ~(x.abs() <= threshold)
    return large.reshape(-1, x.shape[-1]).any(dim=0) if outliers == "columns" else large


def int8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded per output: int8 `[out, in]`, fp32 `[out]`."""
    integers, scale = quantize_rows_int8(weight.detach())
    return integers.to(torch.int8), scale[:, 0]
