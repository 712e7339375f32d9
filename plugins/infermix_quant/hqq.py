"""HQQ: zero points that make a robust norm of the weights' own error small. No data.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023): minimise |W - Q^-1(Q(W))|_p,
p < 1, by alternating a shrinkage of the error (its outliers) with the zero point that is best for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infermix_quant.grid import Quantized, fit_grid, scale_dtype


@dataclass(frozen=True)
class HqqSettings:
    """`norm` is p; `beta` weighs the quadratic term and grows by `kappa` a step."""

    bits: int
    group_size: int
    iterations: int = 20
    norm: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01


def hqq(weight: Tensor, settings: HqqSettings) -> Quantized:
    """`weight [N, K]` -> integers with 16-bit scales and 16-bit zero points that are no integers.

    Every group keeps the zero point of its smallest error, so that none is worse than plain asymmetric rounding.
    """
    groups = weight.detach().float().unflatten(1, (-1, settings.group_size))
    scale = fit_grid(groups, settings.bits, False, weight.dtype).scale
    low = groups.amin(dim=-1, keepdim=True).clamp(max=0)
    zero = best = torch.round(-low / scale).clamp(0, 2**settings.bits - 1)
    least = group_error(groups, scale, best, settings)
    beta = settings.beta
    for _ in range(settings.iterations):
        q = _integers(groups, scale, zero, settings.bits)
        outliers = _shrink(groups - (q - zero) * scale, beta, settings.norm)
        zero = _stored(torch.mean(q - (groups - outliers) / scale, dim=-1, keepdim=True), weight.dtype)
        error = group_error(groups, scale, zero, settings)
        best, least = torch.where(error < least, zero, best), torch.minimum(error, least)
        beta *= settings.kappa
    q = _integers(groups, scale, best, settings.bits)
    kind = scale_dtype(weight.dtype)
    return Quantized(q.flatten(1).to(torch.uint8), scale[..., 0].to(kind), best[..., 0].to(kind), settings.bits)


def group_error(groups: Tensor, scale: Tensor, zero: Tensor, settings: HqqSettings) -> Tensor:
    """Sum of |w - wq|^p over every group, `[..., 1]`."""
    q = _integers(groups, scale, zero, settings.bits)
    return (groups - (q - zero) * scale).abs().pow(settings.norm).sum(dim=-1, keepdim=True)


def _integers(groups: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    return torch.round(groups / scale + zero).clamp(0, 2**bits - 1)


def _shrink(error: Tensor, beta: float, norm: float) -> Tensor:
    """The generalised soft threshold, the proximal operator of |.|_p."""
    magnitude = error.abs()
    return error.sign() * torch.relu(magnitude - magnitude.clamp_min(1e-12).pow(norm - 1) / beta)


def _stored(zero: Tensor, dtype: torch.dtype) -> Tensor:
    """As 16 bits hold it: the error that is measured is the one that stays."""
    return zero.to(scale_dtype(dtype)).float()
