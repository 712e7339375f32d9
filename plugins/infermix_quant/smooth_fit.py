"""Scales of SmoothQuant that make the expected rounding error itself small, instead of a power of magnitudes.

Rounding to nearest with a step d errs by d^2 / 12 on average where values are larger than d. With s = exp(l), inputs
x / s [R, K] rounded per row and weights w s [N, K] per output, both in 127 steps, 12 * 127^2 times the squared error
of all outputs is then expected to be (without the product of both errors, which is small)

    sum_r max_k (x_rk^2 e^-2l_k) * sum_nk w_nk^2 e^2l_k  +  sum_n max_k (w_nk^2 e^2l_k) * sum_rk x_rk^2 e^-2l_k

Sums and maxima of exponentials of linear functions of l are convex, and so are products of such sums (a geometric
program: Boyd and Vandenberghe, "Convex Optimization", section 4.5): a descent cannot be caught in a local minimum.
It starts from SmoothQuant's best exponent and is short: it goes e^4 times up or down at most. Where one massive value
makes a step larger than most others, the formula is wrong for those; measured errors decide in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infermix_quant.smooth import LEAST_SCALE, SEARCH_ROWS, Rounding, Smoothed, search_alpha

#: Rows of an input that are kept: one half to fit scales to, one to judge them.
FIT_ROWS = 4096
_STEPS, _CHECKED = 160, 40
#: Adam's (Kingma and Ba, 2014), on the logarithms of the scales: a step changes a scale by some 5 %, later by less.
_RATE, _MEAN_DECAY, _SQUARE_DECAY, _EPSILON = 0.05, 0.9, 0.99, 1e-12


@dataclass(frozen=True)
class Fitted(Smoothed):
    """`start [K]`: the scale it began from; `ratio`: the squared error that is left of that one's, on rows that
    neither was made for."""

    start: Tensor
    ratio: float


def fit_scale(rows: Tensor, max_abs: Tensor, weights: Sequence[Tensor], *, static: bool) -> Fitted:
    """The scale `[K]` of an input of which `rows [R, K]` fp32 are seen, read by `weights [N, K]`.

    Every second row is for fitting. Of the scales that the descent on them passes through, it takes the one whose
    rounded outputs err least on the other rows; its start, the choice of `search_alpha` for about `SEARCH_ROWS` of
    the rows for fitting, is among them. `static` as there.
    """
    seen, judging = rows[::2], rows[1::2] if len(rows) > 1 else rows
    found = search_alpha(seen[:: max(1, len(seen) // SEARCH_ROWS)], max_abs, weights, static=static)
    rounding = Rounding(judging, max_abs, weights, static=static)
    candidates = [found.scale]
    if len(rows) > 1:
        candidates += _passed(ExpectedError(seen, max_abs, weights, static=static), found.scale)
    errors = [rounding.error(scale) for scale in candidates]
    least = min(errors)
    ratio = least / errors[0] if errors[0] > 0 else 1.0
    return Fitted(found.alpha, candidates[errors.index(least)], rounding.relative(least), found.scale, ratio)


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
            passed.append(at.exp().clamp(LEAST_SCALE, 1 / LEAST_SCALE))
    return passed


class ExpectedError:
    """The sum of products above; with `static`, all rows are rounded by the scale of the largest, `max_abs [K]`."""

    def __init__(self, rows: Tensor, max_abs: Tensor, weights: Sequence[Tensor], *, static: bool) -> None:
        self._inputs = max_abs.square()[None] * len(rows) if static else rows.square()
        self._power = rows.square().sum(0)
        self._weights = torch.cat([weight.detach().float() for weight in weights]).square()
        self._columns = self._weights.sum(0)
        self._known = (self._power > 0) & (self._columns > 0)

    def value(self, log_scale: Tensor) -> Tensor:
        """At l `[K]`, a scalar."""
        (inputs, _, columns), (weights, _, power) = self._terms(log_scale)
        return inputs.sum() * columns.sum() + weights.sum() * power.sum()

    def slope(self, log_scale: Tensor) -> Tensor:
        """A subgradient of half the logarithm, `[K]`: it is of one size for all inputs.

        0 for channels of which the rows or the weights show nothing: one side alone would pull them away for ever.
        """
        (inputs, where, columns), (weights, place, power) = self._terms(log_scale)
        total = inputs.sum() * columns.sum() + weights.sum() * power.sum()
        lowered = _by_channel(inputs, where, columns) * columns.sum() + weights.sum() * power
        raised = inputs.sum() * columns + _by_channel(weights, place, power) * power.sum()
        return ((raised - lowered) / total).where(self._known, 0)

    def _terms(self, log_scale: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Of either product: maxima and their channels `[R]` or `[N]`, and the sum's parts `[K]`."""
        up = torch.exp(2 * log_scale)
        inputs, where = (self._inputs / up).max(dim=1)
        weights, place = (self._weights * up).max(dim=1)
        return (inputs, where, self._columns * up), (weights, place, self._power / up)


def _by_channel(values: Tensor, channels: Tensor, like: Tensor) -> Tensor:
    """Sums of `values [R]`, like `like [K]`, in one order: `index_add_` has none on a GPU, `index_put_` on a CPU."""
    sums = torch.zeros_like(like)
    if values.is_cuda:
        return sums.index_put_((channels,), values, accumulate=True)
    return sums.index_add_(0, channels, values)
