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
_LEAST = 1e-5


@dataclass(frozen=True)
class Smoothed:
    """`scale [K]` of exponent `alpha` (`None`: no scaling), and the relative error of the rounded outputs."""

    alpha: float | None
    scale: Tensor
    error: float


def smooth_scale(max_abs: Tensor, weights: Sequence[Tensor], alpha: float) -> Tensor:
    """The scale `[K]` of an input with the largest magnitudes `max_abs [K]`, read by `weights [N, K]`."""
    largest = torch.stack([weight.float().abs().amax(dim=0) for weight in weights]).amax(dim=0)
    scale = max_abs.clamp_min(_LEAST).pow(alpha) / largest.clamp_min(_LEAST).pow(1 - alpha)
    return scale.clamp(_LEAST, 1 / _LEAST)


def search_alpha(rows: Tensor, max_abs: Tensor, weights: Sequence[Tensor], *, static: bool) -> Smoothed:
    """The exponent of `ALPHAS` with the smallest summed squared error of all outputs over `rows [R, K]`.

    Both sides of the product are rounded as the linear rounds them: weights per output, activations per row or
    (`static`) by the one scale that `max_abs` gives. No scaling is among the candidates: on these rows, the result is
    never worse than that.
    """
    wide = [weight.detach().float() for weight in weights]
    exact = [rows @ weight.t() for weight in wide]
    power = float(sum(out.square().sum() for out in exact))
    candidates = [
        (None, torch.ones_like(max_abs)),
        *((alpha, smooth_scale(max_abs, wide, alpha)) for alpha in ALPHAS),
    ]
    found = [(_error(rows, max_abs, wide, exact, scale, static), alpha, scale) for alpha, scale in candidates]
    least, alpha, scale = min(found, key=lambda each: each[0])
    return Smoothed(alpha, scale, (least / max(power, 1e-30)) ** 0.5)


def _error(
    rows: Tensor, max_abs: Tensor, weights: Sequence[Tensor], exact: Sequence[Tensor], scale: Tensor, static: bool
) -> float:
    seen = _seen(rows / scale, (max_abs / scale).amax() / INT8_MAX if static else None)
    products = (seen @ _rounded(weight * scale).t() for weight in weights)
    return float(sum((product - out).square().sum() for product, out in zip(products, exact, strict=True)))


def _seen(x: Tensor, fixed: Tensor | None) -> Tensor:
    integers, step = quantize_rows_int8(x) if fixed is None else (round_int8(x, fixed), fixed)
    return integers * step


def _rounded(weight: Tensor) -> Tensor:
    integers, scale = int8_weight(weight)
    return integers.float() * scale[:, None]
