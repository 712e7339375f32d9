"""SmoothQuant: scales that move what is hard to round from activations into weights.

Xiao et al., "SmoothQuant" (2022), equation 4: s = max|x|^alpha / max|w|^(1 - alpha); x / s meets s w. The paper tunes
one alpha for a model; here every input may have its own, found as AWQ finds its exponents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infermix_quant.linear_int8 import INT8_MAX, int8_weight, quantize_rows_int8, round_int8

#: Rows of an input that the search multiplies, once per exponent: a calibration of few forwards in all.
SEARCH_ROWS = 512
ALPHAS = tuple(step / 20 for step in range(21))
#: Scales lie between this and its inverse.
LEAST_SCALE = 1e-5


@dataclass(frozen=True)
class Smoothed:
    """`scale [K]` and the relative error of the rounded outputs; `alpha` is its exponent, or that it started from
    (`None`: no scaling)."""

    alpha: float | None
    scale: Tensor
    error: float


def smooth_scale(max_abs: Tensor, weights: Sequence[Tensor], alpha: float) -> Tensor:
    """The scale `[K]` of an input with the largest magnitudes `max_abs [K]`, read by `weights [N, K]`."""
    largest = torch.stack([weight.float().abs().amax(dim=0) for weight in weights]).amax(dim=0)
    scale = max_abs.clamp_min(LEAST_SCALE).pow(alpha) / largest.clamp_min(LEAST_SCALE).pow(1 - alpha)
    return scale.clamp(LEAST_SCALE, 1 / LEAST_SCALE)


def search_alpha(rows: Tensor, max_abs: Tensor, weights: Sequence[Tensor], *, static: bool) -> Smoothed:
    """The exponent of `ALPHAS` with the smallest summed squared error of all outputs over `rows [R, K]`.

    No scaling is among the candidates: on these rows, the result is never worse than that.
    """
    rounding = Rounding(rows, max_abs, weights, static=static)
    candidates = [
        (None, torch.ones_like(max_abs)),
        *((alpha, smooth_scale(max_abs, rounding.weights, alpha)) for alpha in ALPHAS),
    ]
    found = [(rounding.error(scale), alpha, scale) for alpha, scale in candidates]
    least, alpha, scale = min(found, key=lambda each: each[0])
    return Smoothed(alpha, scale, rounding.relative(least))


class Rounding:
    """Errors of the outputs of `weights [N, K]` on `rows [R, K]`, by the scale of the input.

    Both sides of a product are rounded as the linear rounds them: weights per output, activations per row or
    (`static`) by the one scale that the largest magnitudes `max_abs [K]` give.
    """

    def __init__(self, rows: Tensor, max_abs: Tensor, weights: Sequence[Tensor], *, static: bool) -> None:
        self._rows, self._max_abs, self._static = rows, max_abs, static
        self.weights = [weight.detach().float() for weight in weights]
        self._exact = [rows @ weight.t() for weight in self.weights]

    def error(self, scale: Tensor) -> float:
        """Summed over all outputs, squared."""
        seen = _seen(self._rows / scale, (self._max_abs / scale).amax() / INT8_MAX if self._static else None)
        outputs = (seen @ _rounded(weight * scale).t() for weight in self.weights)
        return float(sum((output - exact).square().sum() for output, exact in zip(outputs, self._exact, strict=True)))

    def relative(self, error: float) -> float:
        """The root of a squared error, as a share of the outputs' norm."""
        power = float(sum(exact.square().sum() for exact in self._exact))
        return (error / max(power, 1e-30)) ** 0.5


def _seen(x: Tensor, fixed: Tensor | None) -> Tensor:
    integers, step = quantize_rows_int8(x) if fixed is None else (round_int8(x, fixed), fixed)
    return integers * step


def _rounded(weight: Tensor) -> Tensor:
    integers, scale = int8_weight(weight)
    return integers.float() * scale[:, None]
