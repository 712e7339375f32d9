"""AWQ: channels of large activations are scaled up before rounding, and ranges are clipped where that helps.

Lin et al., "AWQ: Activation-aware Weight Quantization" (2023), equations 4 and 5: minimise
|Q(W diag(s)) diag(s)^-1 X - W X| over s = mean|x|^a, a in 0 ... 1. With G = X X^T that error is the trace of D G D^T
for the difference D of the weights, so no activation is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infermix_quant.grid import Quantized, fit_grid, quantized

_MOST_CLIPPED = 0.5


@dataclass(frozen=True)
class AwqSettings:
    """`grid` exponents are tried for the scale, and half as many ratios from 1 to 0.5 for the clipped range."""

    bits: int
    group_size: int
    symmetric: bool
    grid: int = 20


def search_scale(weights: Sequence[tuple[Tensor, AwqSettings]], gram: Tensor, mean_abs: Tensor, grid: int) -> Tensor:
    """The scale `[K]` with the smallest summed output error of all weights `[N, K]` of one input.

    Exponent 0 is among the candidates: the result is never worse than no scaling.
    """
    best, least = torch.ones_like(mean_abs), float("inf")
    for step in range(grid):
        scale = channel_scale(mean_abs, step / grid)
        error = sum(
            _scaled_error(weight.detach().float(), settings, gram, scale, weight.dtype)
            for weight, settings in weights
        )
        if error < least:
            best, least = scale, float(error)
    return best


def channel_scale(mean_abs: Tensor, exponent: float) -> Tensor:
    """`mean_abs ** exponent`, centred so that the largest and the smallest are each other's inverse."""
    scale = mean_abs.clamp_min(1e-4).pow(exponent)
    return scale / (scale.amax() * scale.amin()).sqrt()


def _scaled_error(weight: Tensor, settings: AwqSettings, gram: Tensor, scale: Tensor, dtype: torch.dtype) -> float:
    groups = (weight * scale).unflatten(1, (-1, settings.group_size))
    rounded = fit_grid(groups, settings.bits, settings.symmetric, dtype).nearest(groups).flatten(1) / scale
    error = rounded - weight
    return float(((error @ gram) * error).sum())


def clip_and_round(weight: Tensor, gram: Tensor | None, settings: AwqSettings) -> Quantized:
    """`weight [N, K]` rounded with the range of every group shrunk to what costs least.

    The error of a group is measured on its own, |x_g (w_g - q_g)|^2, from its diagonal block of `gram`. Without it,
    nothing is clipped.
    """
    groups = weight.detach().float().unflatten(1, (-1, settings.group_size))
    best = fit_grid(groups, settings.bits, settings.symmetric, weight.dtype)
    scale, zero = best.scale, best.zero
    if gram is not None:
        blocks = _diagonal_blocks(gram, settings.group_size)
        least = _group_error(groups, best.nearest(groups), blocks)
        for step in range(1, settings.grid // 2):
            shrink = 1 - step * (1 - _MOST_CLIPPED) / (settings.grid // 2)
            grid = fit_grid(groups, settings.bits, settings.symmetric, weight.dtype, shrink)
            error = _group_error(groups, grid.nearest(groups), blocks)
            better = error < least
            scale, zero = torch.where(better, grid.scale, scale), torch.where(better, grid.zero, zero)
            least = torch.minimum(error, least)
    final = type(best)(scale, zero, settings.bits)
    return quantized(
        final.integers(groups).flatten(1),
        scale[..., 0],
        zero[..., 0],
        settings.bits,
        settings.symmetric,
        weight.dtype,
    )


def _diagonal_blocks(gram: Tensor, size: int) -> Tensor:
    """`[G, size, size]`."""
    count = gram.shape[0] // size
    index = torch.arange(count, device=gram.device)
    return gram.view(count, size, count, size)[index, :, index]


def _group_error(groups: Tensor, rounded: Tensor, blocks: Tensor) -> Tensor:
    """`[N, G, 1]`."""
    error = (rounded - groups).transpose(0, 1)
    return ((error @ blocks) * error).sum(-1, keepdim=True).transpose(0, 1)
