"""How long a step takes: a curve through measured steps, and the roofline where nothing was measured. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from infermix.cost.kv import kv_groups
from infermix.cost.roofline import phase_cost
from infermix.roles.facts import Ceilings, ModelFacts

#: New tokens of a step between which its time is taken to be linear.
KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
FEATURES = ("step", "mixed", "sequences", *(f"tokens_from_{knot}" for knot in KNOTS), "context", "pairs")
_SWEEPS = 4000


class StepWork(NamedTuple):
    """What one step computes: new tokens over all sequences, tokens of context that attention reads, and, of
    sequences with more than one new token, the (query, key) pairs of causal attention.
    """

    num_seqs: int
    new_tokens: int
    context_tokens: int
    pairs: int


def features(work: StepWork) -> list[float]:
    """One value per name of `FEATURES`; a step's time is their sum with coefficients from 0 on."""
    tokens = work.new_tokens
    ends = (*KNOTS[1:], float("inf"))
    pieces = [float(max(0, min(tokens, end) - start)) for start, end in zip(KNOTS, ends, strict=True)]
    mixed = float(tokens > work.num_seqs)
    return [1.0, mixed, float(work.num_seqs), *pieces, float(work.context_tokens), float(work.pairs)]


@dataclass(frozen=True)
class Roofline:
    """The least time of a step on this machine: the longer of moving its bytes and computing its FLOPs."""

    weight_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    flops_per_pair: float
    bytes_per_s: float
    flops_per_s: float

    def seconds(self, work: StepWork) -> float:
        num_bytes = self.weight_bytes + self.kv_bytes_per_token * work.context_tokens
        flops = self.flops_per_token * work.new_tokens + self.flops_per_pair * (work.context_tokens + work.pairs)
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


def roofline(
    facts: ModelFacts,
    ceilings: Ceilings,
    dtype: str,
    *,
    weight_bits: float | None = None,
    kv_bytes_per_token: float | None = None,
) -> Roofline | None:
    """`None` where the machine's ceilings are not measured. Windows are not counted: a context is read in full."""
    flops_per_s = ceilings.matmul_flops_per_s.get(dtype)
    if not ceilings.copy_bytes_per_s or not flops_per_s:
        return None
    one, two = (
        phase_cost(facts, "step", batch=tokens, new_tokens=1, context=1, weight_bits=weight_bits) for tokens in (1, 2)
    )
    longer = phase_cost(facts, "step", batch=1, new_tokens=1, context=2)
    pair = longer.flops - phase_cost(facts, "step", batch=1, new_tokens=1, context=1).flops
    own = sum(group.bytes_per_token(facts.dtype_bytes) for group in kv_groups(facts))
    return Roofline(
        weight_bytes=one.weight_bytes,
        kv_bytes_per_token=own if kv_bytes_per_token is None else kv_bytes_per_token,
        flops_per_token=two.flops - one.flops - pair,
        flops_per_pair=pair,
        bytes_per_s=ceilings.copy_bytes_per_s,
        flops_per_s=flops_per_s,
    )


class FittedSteps:
    """step_s = sum of coefficient x feature. Piecewise linear and never falling in the new tokens."""

    def __init__(self, coefficients: Sequence[float]) -> None:
        assert len(coefficients) == len(FEATURES)
        self._step, self._mixed, self._seq = coefficients[:3]
        self._slopes = list(coefficients[3:-2])
        self._context, self._pair = coefficients[-2:]
        self._at_knot = [0.0]
        for index, slope in enumerate(self._slopes[:-1]):
            self._at_knot.append(self._at_knot[-1] + slope * (KNOTS[index + 1] - KNOTS[index]))

    def seconds(self, work: StepWork) -> float:
        num_seqs, tokens, context, pairs = work
        piece = bisect_right(KNOTS, tokens) - 1
        rest = self._at_knot[piece] + self._slopes[piece] * (tokens - KNOTS[piece])
        fixed = self._step + (self._mixed if tokens > num_seqs else 0.0)
        return fixed + self._seq * num_seqs + rest + self._context * context + self._pair * pairs


def fit_steps(works: Sequence[StepWork], seconds: Sequence[float]) -> list[float]:
    """Coefficients by least squares of relative errors, none below 0, scaled so that the total time is kept.

    Relative, so that a few long prompts do not decide about the short steps. Steps that took more than five times
    what a first fit says (another process had the core) do not shape the curve, but count in the total.
    """
    table, times = np.array([features(work) for work in works]), np.array(seconds)
    found = _non_negative(table / times[:, None])
    usual = times <= 5 * np.maximum(table @ found, 1e-12)
    if not usual.all() and usual.any():
        found = _non_negative(table[usual] / times[usual][:, None])
    predicted = float((table @ found).sum())
    return [float(value) for value in found * (times.sum() / predicted if predicted > 0 else 1.0)]


def _non_negative(rows: np.ndarray) -> np.ndarray:
    """min |rows x - 1|^2 with x >= 0, by coordinate descent on the normal equations of scaled columns."""
    scales = np.abs(rows).max(axis=0)
    used = np.flatnonzero(scales > 0)
    scaled = rows[:, used] / scales[used]
    gram = scaled.T @ scaled + 1e-9 * len(rows) * np.eye(len(used))
    target = scaled.sum(axis=0)
    x = np.zeros(len(used))
    for _ in range(_SWEEPS):
        before = x.copy()
        for j in range(len(used)):
            x[j] = max(0.0, x[j] + (target[j] - gram[j] @ x) / gram[j, j])
        if np.abs(x - before).max() <= 1e-9 * max(1e-30, np.abs(x).max()):
            break
    found = np.zeros(rows.shape[1])
    found[used] = x / scales[used]
    return found
