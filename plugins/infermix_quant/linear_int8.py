"""Linears with int8 weights and int8 activations: a scale per output and per token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infermix_quant.linear_grouped import QuantLinear

INT8_MAX = 127


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
    """LLM.int8: values above a threshold stay out of the integers and are multiplied in 16 bits.

    Dettmers et al., "LLM.int8()" (2022), section 3.2, where a *column* that exceeds the threshold anywhere in the
    batch is taken out for all tokens. Here it is taken out for the tokens that exceed it, so that a token does not
    depend on its company. Weights are int8 in both parts, as in the paper's inference library.
    """

    kernel = "simulated int8: fp32 product of integers, outliers dequantized"

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, threshold: float) -> None:
        super().__init__(weight, scale, bias)
        self._threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        outliers = x.masked_fill(x.abs() <= self._threshold, 0)
        weight = (self.weight.float() * self.weight_scale[:, None]).to(x.dtype)
        return super().forward(x - outliers) + F.linear(outliers, weight)


def int8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded per output: int8 `[out, in]`, fp32 `[out]`."""
    integers, scale = quantize_rows_int8(weight.detach())
    return integers.to(torch.int8), scale[:, 0]
