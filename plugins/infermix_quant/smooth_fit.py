"""Scales of SmoothQuant that make the expected rounding error itself small, instead of a power of magnitudes.

Rounding to nearest with a step d errs by d^2 / 12 on average. With s = exp(l), inputs x / s [R, K] rounded per row
and weights w s [N, K] per output, both in 127 steps, 12 * 127^2 times the squared error of all outputs is expected
to be

    sum_r max_k (x_rk^2 e^-2l_k) * sum_nk w_nk^2 e^2l_k  +  sum_n max_k (w_nk^2 e^2l_k) * sum_rk x_rk^2 e^-2l_k

Sums and maxima of exponentials of linear functions of l are convex, and so are products of such sums (a geometric
program: Boyd and Vandenberghe, "Convex Optimization", section 4.5): what a descent finds is no accident of where it
began. SmoothQuant's exponents are the start, and measured errors decide in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infermix_quant.smooth import SEARCH_ROWS, Rounding, Smoothed, search_alpha

#: Rows of an input that are looked at: with few, the scales suit their largest values and no others.
FIT_ROWS = 2048
_STEPS, _CHECKED = 160, 40
#: Adam's (Kingma and Ba, 2014), on the logarithms of the scales: a step changes a scale by some 5 %, later by less.
_RATE, _MEAN_DECAY, _SQUARE_DECAY, _EPSILON = 0.05, 0.9, 0.99, 1e-12


@dataclass(frozen=True)
class Fitted(Smoothed):
    """`ratio`: the squared error on the rows, as a share of that of the scale it started from."""

    ratio: float


def fit_scale(rows: Tensor, max_abs: Tensor, weights: Sequence[Tensor], *, static: bool) -> Fitted:
    """The scale `[K]` of an input of which `rows [R, K]` are seen, read by `weights [N, K]`.

    Of the scales that the descent passes through, the one whose rounded outputs err least on the rows. Its start, the
    choice of `search_alpha`, is among them: on these rows, the result is never worse than that. `static` as there.
    """
    found = search_alpha(rows[:: max(1, len(rows) // SEARCH_ROWS)], max_abs, weights, static=static)
    rounding = Rounding(rows, max_abs, weights, static=static)
    expected = ExpectedError(rows, max_abs, weights, static=static)
    candidates = [found.scale, *_passed(expected, found.scale)]
    errors = [rounding.error(scale) for scale in candidates]
    least = min(errors)
    scale = candidates[errors.index(least)]
    return Fitted(found.alpha, scale, rounding.relative(least), least / max(errors[0], 1e-30))


def _passed(expected: ExpectedError, start: Tensor) -> list[Tensor]:
    """Scales on the way of a descent with steps that shrink to nothing."""
    at = start.log()
    mean, square = torch.zeros_like(at), torch.zeros_like(at)
    passed = []
    for step in range(1, _STEPS + 1):
        slope = expected.slope(at)
        mean = mean.lerp(slope, 1 - _MEAN_DECAY)
        square = square.lerp(slope.square(), 1 - _SQUARE_DECAY)
        size = (square / (1 - _SQUARE_DECAY**step)).sqrt() + _EPSILON
        at = at - _RATE * (1 - (step - 1) / _STEPS) * mean / (1 - _MEAN_DECAY**step) / size
        if step % _CHECKED == 0:
            passed.append(at.exp())
    return passed


class ExpectedError:
    """The sum of products above; with `static`, all rows are rounded by the scale of the largest, `max_abs [K]`."""

    def __init__(self, rows: Tensor, max_abs: Tensor, weights: Sequence[Tensor], *, static: bool) -> None:
        self._inputs = max_abs.square()[None] * len(rows) if static else rows.square()
        self._power = rows.square().sum(0)
        self._weights = torch.cat([weight.detach().float() for weight in weights]).square()
        self._columns = self._weights.sum(0)

    def value(self, log_scale: Tensor) -> Tensor:
        """At l `[K]`, a scalar."""
        return sum((peaks.sum() * others.sum() for peaks, _, others in self._terms(log_scale)), torch.tensor(0.0))

    def slope(self, log_scale: Tensor) -> Tensor:
        """A subgradient of half the logarithm, `[K]`: it is of one size for all inputs."""
        (inputs, where, columns), (weights, place, power) = self._terms(log_scale)
        total = inputs.sum() * columns.sum() + weights.sum() * power.sum()
        lowered = torch.zeros_like(columns).index_add_(0, where, inputs) * columns.sum() + weights.sum() * power
        raised = inputs.sum() * columns + torch.zeros_like(power).index_add_(0, place, weights) * power.sum()
        return (raised - lowered) / total

    def _terms(self, log_scale: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Of either product: maxima and their columns `[R]` or `[N]`, and the sum's parts `[K]`."""
        up = torch.exp(2 * log_scale)
        inputs, where = (self._inputs / up).max(dim=1)
        weights, place = (self._weights * up).max(dim=1)
        return (inputs, where, self._columns * up), (weights, place, self._power / up)
