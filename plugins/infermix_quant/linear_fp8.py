"""Linears with FP8 (E4M3) weights, and activations in FP8 or as they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infermix_quant.linear_grouped import QuantLinear

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
#: Significant bits.
E4M3_PRECISION = 4.0


def round_e4m3(values: Tensor) -> Tensor:
    """To the nearest E4M3 number, saturated: a plain cast turns what is too large into NaN."""
    return values.float().clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def fp8_weight(weight: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    """`weight [out, in]` -> E4M3, and fp32 scales `[out]` (`channel`) or `[1]` (`tensor`)."""
    magnitude = weight.detach().float().abs()
    peak = magnitude.amax(dim=1) if granularity == "channel" else magnitude.amax().view(1)
    scale = peak.clamp_min(1e-30) / E4M3_MAX
    return round_e4m3(weight.detach().float() / scale[:, None]), scale


class Fp8Linear(QuantLinear):
    """`activations`: `none`, `token` (a scale per row, found on the way in) or `tensor` (one fixed scale)."""

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        *,
        activations: str,
        input_scale: Tensor | None = None,
    ) -> None:
        """`weight [out, in]` E4M3, `scale [out or 1]` fp32, `input_scale` fp32 scalar for `tensor`."""
        super().__init__(weight.shape[0], weight.shape[1], bias)
        assert (activations == "tensor") == (input_scale is not None)
        self.activations = activations
        self.kernel = "dequantize+matmul" if activations == "none" else "simulated fp8: fp32 product of E4M3 numbers"
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", input_scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.activations == "none":
            return F.linear(x, (self.weight.float() * self.weight_scale[:, None]).to(x.dtype), self.bias)
        scale = self._row_scale(x)
        rounded = round_e4m3(x.float() / scale).float()
        out = (F.linear(rounded, self.weight.float()) * scale * self.weight_scale).to(x.dtype)
        return out if self.bias is None else out + self.bias

    def _row_scale(self, x: Tensor) -> Tensor:
        if self.input_scale is not None:
            return self.input_scale
        return x.float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / E4M3_MAX
