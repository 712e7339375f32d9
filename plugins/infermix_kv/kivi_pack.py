"""Numbers of 4 or 2 bits with a scale and a zero point per group. Plain PyTorch, capturable."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float16).max


def quantize(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers uint8 below `2 ** bits`, scale and zero point fp16 with `dim` of size 1: `number * scale + zero = x`.

    Asymmetric: the least number of a group along `dim` is its zero point, the greatest the last step above it.
    """
    wide = x.float()
    low, high = wide.amin(dim, keepdim=True), wide.amax(dim, keepdim=True)
    zero = low.clamp(-_LARGEST, _LARGEST).half()
    scale = ((high - zero.float()) / (2**bits - 1)).clamp(0, _LARGEST).half()
    steps = scale.float()
    inverse = torch.where(steps > 0, 1 / steps, torch.zeros_like(steps))
    numbers = ((wide - zero.float()) * inverse).round().clamp(0, 2**bits - 1)
    return numbers.to(torch.uint8), scale, zero
