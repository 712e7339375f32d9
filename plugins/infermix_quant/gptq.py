"""GPTQ: columns are rounded one after another, the error of each is carried into those that follow.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022): with
H = X^T X and U the upper Cholesky factor of H^-1, rounding column i with error e_i changes column j > i by
-e_i U_ij / U_ii, which minimises |X (W - Q)^T|^2 over what is not yet rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from infermix.errors import UserError
from torch import Tensor

from infermix_quant.grid import Grid, Quantized, fit_grid, quantized


@dataclass(frozen=True)
class GptqSettings:
    """`damping` is added to H as a share of its mean diagonal. Columns are updated lazily, `block_size` at a time.

    `act_order` rounds columns of large activations first; groups then follow that order, unless `static_groups`
    fits all scales beforehand, in the original order.
    """

    bits: int
    group_size: int
    symmetric: bool
    damping: float = 0.01
    block_size: int = 128
    act_order: bool = False
    static_groups: bool = False


def gptq(weight: Tensor, gram: Tensor, settings: GptqSettings, name: str = "the matrix") -> Quantized:
    """`weight [N, K]`, `gram [K, K]` fp32 (X^T X) -> the quantized weight.

    Raises `UserError` naming the linear when `gram` has no inverse, even damped.
    """
    order = _order(gram, settings)
    work = weight.detach().float()[:, order].clone()
    factor = _inverse_factor(gram[order][:, order], settings.damping, name)
    grids = _Grids(weight, order, settings)
    q = torch.empty_like(work)
    for start in range(0, work.shape[1], settings.block_size):
        end = min(start + settings.block_size, work.shape[1])
        errors = torch.empty(work.shape[0], end - start, device=work.device)
        for column in range(start, end):
            grid = grids.of(column, work)
            q[:, column : column + 1] = integers = grid.integers(work[:, column : column + 1])
            error = (work[:, column : column + 1] - grid.values(integers)) / factor[column, column]
            work[:, column + 1 : end].addmm_(error, factor[column : column + 1, column + 1 : end], alpha=-1)
            errors[:, column - start : column - start + 1] = error
        work[:, end:].addmm_(errors, factor[start:end, end:], alpha=-1)
    return grids.result(q)


def output_error(weight: Tensor, result: Tensor, gram: Tensor) -> float:
    """|X (W - Q)^T|^2 / |X W^T|^2, from `gram` = X^T X."""
    error, whole = weight.float() - result.float(), weight.float()
    return float(((error @ gram) * error).sum() / ((whole @ gram) * whole).sum().clamp_min(1e-30))


def _order(gram: Tensor, settings: GptqSettings) -> Tensor:
    """Columns in the order in which they are rounded."""
    diagonal = gram.diagonal()
    if settings.act_order:
        return torch.argsort(diagonal, descending=True, stable=True)
    return torch.arange(diagonal.numel(), device=gram.device)


def _inverse_factor(gram: Tensor, damping: float, name: str) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped Gram matrix.

    A column that is always zero gets a diagonal of one: it is rounded plainly and disturbs no other.
    """
    damped = gram.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += damping * diagonal.mean()
    lower, failed = torch.linalg.cholesky_ex(damped)
    if not int(failed):
        factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(failed):
        raise UserError(
            f"the activations of {name} are degenerate: their Gram matrix cannot be inverted with damping {damping}",
            key="parts.quantizer.damping",
            hint="raise damping, or give more calibration samples",
        )
    return factor


class _Grids:
    """The grid of every column: fitted where a group begins, or all beforehand."""

    def __init__(self, weight: Tensor, order: Tensor, settings: GptqSettings) -> None:
        self._settings, self._order, self._dtype = settings, order, weight.dtype
        self._scales: list[Tensor] = []
        self._zeros: list[Tensor] = []
        self._current: Grid | None = None
        if settings.static_groups:
            groups = weight.detach().float().unflatten(1, (-1, settings.group_size))
            grid = self._fit(groups)
            self._scales, self._zeros = list(grid.scale.unbind(1)), list(grid.zero.unbind(1))
            self._group_of = (order // settings.group_size).tolist()

    def _fit(self, weights: Tensor) -> Grid:
        return fit_grid(weights, self._settings.bits, self._settings.symmetric, self._dtype)

    def of(self, column: int, work: Tensor) -> Grid:
        """`column` in the order of rounding; `work` holds what the columns are by now."""
        if self._settings.static_groups:
            group = self._group_of[column]
            return Grid(self._scales[group], self._zeros[group], self._settings.bits)
        size = self._settings.group_size
        if column % size == 0:
            self._current = self._fit(work[:, column : column + size])
            self._scales.append(self._current.scale)
            self._zeros.append(self._current.zero)
        assert self._current is not None
        return self._current

    def result(self, q: Tensor) -> Quantized:
        """`q` in the order of rounding -> columns in the order of x."""
        settings, order = self._settings, self._order
        back = torch.argsort(order)
        moved = settings.act_order and not settings.static_groups
        group = back // settings.group_size if moved else None
        return quantized(
            q[:, back], torch.cat(self._scales, 1), torch.cat(self._zeros, 1), settings.bits, settings.symmetric,
            self._dtype, group,
        )  # fmt: skip
