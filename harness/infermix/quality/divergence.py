"""How far one set of logits is from another. Plain tensors, no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Rows compared at once, so that the double-precision copies stay small for large vocabularies.
ROWS_PER_CHUNK = 64


@dataclass(frozen=True)
class Divergence:
    """Sums over positions. `kl`: KL(reference || cell) in nats; `excused`: top-1 differences at near ties."""

    num_positions: int
    kl: float
    disagreements: int
    excused: int
    max_logit_difference: float

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(
            self.num_positions + other.num_positions,
            self.kl + other.kl,
            self.disagreements + other.disagreements,
            self.excused + other.excused,
            max(self.max_logit_difference, other.max_logit_difference),
        )


NOTHING_COMPARED = Divergence(0, 0.0, 0, 0, 0.0)


def compare_logits(reference: Tensor, cell: Tensor, near_tie: float) -> Divergence:
    """Compare `[n, V]` logits row by row. Raises `ValueError` for other shapes and for values not finite."""
    if reference.shape != cell.shape:
        raise ValueError(f"logits differ in shape: {tuple(reference.shape)} and {tuple(cell.shape)}")
    chunks = zip(reference.split(ROWS_PER_CHUNK), cell.split(ROWS_PER_CHUNK), strict=True)
    return sum((_compare_chunk(r.double(), c.double(), near_tie) for r, c in chunks), NOTHING_COMPARED)


def _compare_chunk(reference: Tensor, cell: Tensor, near_tie: float) -> Divergence:
    log_p, log_q = reference.log_softmax(-1), cell.log_softmax(-1)
    # xlogy-like: a probability of zero contributes nothing, whatever the other side says.
    terms = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0)
    kl = float(terms.sum())
    if not torch.isfinite(cell).any(dim=-1).all() or kl != kl:
        raise ValueError("logits are not finite")
    differs = reference.argmax(-1) != cell.argmax(-1)
    difference = torch.where(reference == cell, 0.0, (reference - cell).abs())
    return Divergence(
        num_positions=reference.shape[0],
        kl=max(kl, 0.0),
        disagreements=int(differs.sum()),
        excused=int((differs & (top2_margin(reference) < near_tie)).sum()),
        max_logit_difference=float(difference.max()),
    )


def top2_margin(logits: Tensor) -> Tensor:
    """Distance between the two largest logits of each row: `[n, V]` -> `[n]`."""
    best = logits.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


def first_difference(reference: list[int], cell: list[int]) -> int | None:
    """Index of the first token that differs (the length of a proper prefix), `None` when equal."""
    for index, (expected, actual) in enumerate(zip(reference, cell, strict=False)):
        if expected != actual:
            return index
    return None if len(reference) == len(cell) else min(len(reference), len(cell))
