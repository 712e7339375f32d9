"""Uniform grids: `w = (q - zero) * scale` with q in 0 ... 2**bits - 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """`scale` and `zero` broadcast against the weights; both fp32, `scale` is representable in 16 bits."""

    scale: Tensor
    zero: Tensor
    bits: int

    def integers(self, weight: Tensor) -> Tensor:
        """The nearest q, fp32."""
        return (torch.round(weight / self.scale) + self.zero).clamp_(0, 2**self.bits - 1)

    def values(self, q: Tensor) -> Tensor:
        return (q - self.zero) * self.scale

    def nearest(self, weight: Tensor) -> Tensor:
        return self.values(self.integers(weight))


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix `[N, K]`, its columns in the order of x.

    `q` uint8; `scale [N, G]` in 16 bits; `zero [N, G]` uint8 or 16-bit float, `None` for the middle `2**(bits - 1)`.
    `group [K]` says which group a column belongs to, `None` for G equal runs.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: Tensor | None = None

    def dequantize(self) -> Tensor:
        """`[N, K]` fp32."""
        group = self.groups()
        zero = 2 ** (self.bits - 1) if self.zero is None else self.zero.float()[:, group]
        return (self.q.float() - zero) * self.scale.float()[:, group]

    def groups(self) -> Tensor:
        if self.group is not None:
            return self.group.long()
        width, count = self.q.shape[1], self.scale.shape[1]
        return torch.arange(width, device=self.q.device) // (width // count)


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit dtype of scales: bf16 for bf16 weights (whose range fp16 lacks), else fp16."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def fit_grid(weights: Tensor, bits: int, symmetric: bool, dtype: torch.dtype, shrink: float = 1.0) -> Grid:
    """The grid over the range of `weights` fp32 in its last dimension, times `shrink`; scale `[..., 1]`.

    Symmetric: the zero point is the middle and both ends lie half a step outside, so that no weight is further than
    half a step from the grid. Otherwise the grid runs from the smallest (at most 0) to the largest (at least 0).
    """
    levels = 2**bits - 1
    low = weights.amin(dim=-1, keepdim=True).clamp_(max=0) * shrink
    high = weights.amax(dim=-1, keepdim=True).clamp_(min=0) * shrink
    span = torch.maximum(high, -low) * 2 if symmetric else high - low
    scale = storable(span / levels, dtype).float()
    zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else torch.round(-low / scale).clamp_(0, levels)
    return Grid(scale, zero, bits)


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive scales in the 16-bit dtype that belongs to weights of `dtype`."""
    kind = scale_dtype(dtype)
    return scale.clamp(min=2.0**-24 if kind == torch.float16 else 2.0**-100).to(kind)


def round_groups(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> Quantized:
    """Round to nearest: `weight [N, K]` in groups of `group_size` columns."""
    groups = weight.detach().float().unflatten(1, (-1, group_size))
    grid = fit_grid(groups, bits, symmetric, weight.dtype)
    return quantized(
        grid.integers(groups).flatten(1), grid.scale[..., 0], grid.zero[..., 0], bits, symmetric, weight.dtype
    )


def quantized(
    q: Tensor,
    scale: Tensor,
    zero: Tensor,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
    group: Tensor | None = None,
) -> Quantized:
    """Fp32 integers, scales and zero points in the dtypes that they are stored in."""
    stored_zero = None if symmetric else zero.to(torch.uint8)
    return Quantized(q.to(torch.uint8), scale.to(scale_dtype(dtype)), stored_zero, bits, group)
