"""A linear over the blocks of a GGUF file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infermix_gguf.blocks import expand


class GgufLinear(nn.Module):
    """`blocks [out, bytes]` uint8, expanded to fp32 and rounded to x's dtype in every forward."""

    blocks: Tensor

    def __init__(self, blocks: Tensor, kind: str, in_features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = in_features, blocks.shape[0], kind
        self.kernel = f"{kind} blocks, dequantize+matmul"
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_buffer("blocks", blocks)

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel()

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """`[out, in]`."""
        return expand(self.blocks, self.kind).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"
