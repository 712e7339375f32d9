"""Linears of quantized weights whose products run in Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from infermix_kernels.fp8 import fp8_linear
from infermix_kernels.matmul_launch import MatmulWorkspace
from infermix_kernels.matmul_table import MatmulTable
from infermix_kernels.pack import PackedW4
from infermix_kernels.reference import matmul as reference
from infermix_kernels.w4a16 import w4a16_linear
from infermix_kernels.w8a8 import w8a8_linear
from torch import Tensor, nn


@dataclass(frozen=True)
class Launching:
    """Shared by all linears of a model: scratch memory, whether kernels may start while others drain, and launch
    parameters that were measured on this machine."""

    workspace: MatmulWorkspace
    overlap: bool
    launches: MatmulTable | None = None


class TritonLinear(nn.Module):
    """Flattens rows around `product [M, K] -> [M, N]`; `plain` is its meaning in PyTorch."""

    def __init__(self, out_features: int, in_features: int, bias: Tensor | None, launching: Launching) -> None:
        super().__init__()
        self.out_features, self.in_features, self._launching = out_features, in_features, launching
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x.reshape(-1, self.in_features))
        return out.view(*x.shape[:-1], self.out_features)

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def plain(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Numbers, scales and zero points."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())


class W4A16Linear(TritonLinear):
    """Four-bit weights in groups, activations as they are."""

    def __init__(self, packed: PackedW4, bias: Tensor | None, launching: Launching) -> None:
        super().__init__(packed.out_features, packed.in_features, bias, launching)
        self.register_buffer("words", packed.words)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("zeros", packed.zeros)
        self._packed = packed

    def product(self, x: Tensor) -> Tensor:
        launching = self._launching
        return w4a16_linear(
            x, self._packed, self.bias, workspace=launching.workspace, launches=launching.launches,
            pdl=launching.overlap,
        )  # fmt: skip

    def plain(self, x: Tensor) -> Tensor:
        return reference.w4a16_linear(x, self._packed, self.bias)


class W8A8Linear(TritonLinear):
    """Eight-bit weights (int8 or FP8 E4M3) with a scale per output, activations quantized per token on the way."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, launching: Launching) -> None:
        """`weight [N, K]` of int8 or float8_e4m3fn, `scale [N]` fp32."""
        super().__init__(weight.shape[0], weight.shape[1], bias, launching)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self._linear = w8a8_linear if weight.dtype == torch.int8 else fp8_linear

    def product(self, x: Tensor) -> Tensor:
        launching = self._launching
        return self._linear(
            x, self.weight, self.weight_scale, self.bias, workspace=launching.workspace, launches=launching.launches,
            pdl=launching.overlap,
        )  # fmt: skip

    def plain(self, x: Tensor) -> Tensor:
        return reference.quantized_linear(x, self.weight, self.weight_scale, self.bias)
