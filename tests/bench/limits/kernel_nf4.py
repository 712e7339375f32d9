"""bitsandbytes' NF4 products, the peer of W4A16 that people use most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kernel_timing import DEVICE, DTYPE
from torch import Tensor

_BLOCK = 64


@dataclass
class WeightNf4:
    """`packed` and `state` as the library makes them."""

    packed: Tensor
    state: Any

    @classmethod
    def random(cls, n: int, k: int) -> WeightNf4:
        from bitsandbytes.functional import quantize_4bit

        weight = torch.randn(n, k, device=DEVICE).to(DTYPE) / 64
        return cls(*quantize_4bit(weight, blocksize=_BLOCK, quant_type="nf4"))

    def meaning(self, x: Tensor) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return x.float() @ dequantize_4bit(self.packed, self.state).float().t()

    def linear(self) -> Callable[[Tensor], Tensor]:
        from bitsandbytes import matmul_4bit

        return lambda x: matmul_4bit(x, self.packed, quant_state=self.state)
