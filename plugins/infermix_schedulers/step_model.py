"""How long a step will take, learned from the steps that were measured."""

from __future__ import annotations

from collections import deque

import numpy as np
from infermix.roles.scheduler import Plan

#: Measured steps that are looked back at, and how often the fit is made anew.
WINDOW, REFIT_EVERY = 512, 32
#: A limit that no step reaches allows so many tokens.
MOST_TOKENS = 2**62


class StepModel:
    """step_s = a + b sequences + c new tokens + d context tokens, a..d >= 0, by least squares over the last steps.

    A prediction is multiplied by the quantile of measured over fitted time, so that this share of steps stays below
    it. Before `REFIT_EVERY` steps have been seen, `predict` gives `None`.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._steps: deque[tuple[float, float, float, float, float]] = deque(maxlen=WINDOW)
        self._since_fit = 0
        self._coefficients = np.zeros(4)
        self._margin = 0.0

    def observe(self, step_s: float, num_seqs: int, new_tokens: int, context_tokens: int) -> None:
        if step_s <= 0:
            return
        self._steps.append((1.0, num_seqs, new_tokens, context_tokens, step_s))
        self._since_fit += 1
        if self._since_fit >= REFIT_EVERY:
            self._fit()

    def predict(self, num_seqs: int, new_tokens: int, context_tokens: int) -> float | None:
        """Seconds that a step stays below with the probability `quantile`."""
        if not self._margin:
            return None
        a, b, c, d = self._coefficients
        return float(self._margin * (a + b * num_seqs + c * new_tokens + d * context_tokens))

    def tokens_within(self, limit_s: float, num_seqs: int, context_tokens: int) -> int | None:
        """Most new tokens of a step of at most `limit_s`; `None` when nothing is known or tokens cost nothing."""
        base, per_token = self.predict(num_seqs, 0, context_tokens), float(self._margin * self._coefficients[2])
        if base is None or per_token <= 0:
            return None
        return max(0, int(min((limit_s - base) / per_token, MOST_TOKENS)))

    def _fit(self) -> None:
        self._since_fit = 0
        table = np.array(self._steps)
        features, times = table[:, :4], table[:, 4]
        # Relative errors count: otherwise a few long prompts would decide about the short steps.
        self._coefficients = _non_negative(features / times[:, None])
        ratios = times / np.maximum(features @ self._coefficients, 1e-12)
        self._margin = float(np.quantile(ratios, self._quantile))


def _non_negative(features: np.ndarray) -> np.ndarray:
    """Least squares for ones, columns with a negative coefficient left out one by one, the constant last."""
    columns = [index for index in range(features.shape[1]) if features[:, index].any()]
    while True:
        scales = np.abs(features[:, columns]).max(axis=0)
        found, *_ = np.linalg.lstsq(features[:, columns] / scales, np.ones(len(features)), rcond=None)
        if (found >= 0).all() or len(columns) == 1:
            coefficients = np.zeros(features.shape[1])
            coefficients[columns] = np.maximum(found / scales, 0)
            return coefficients
        worst = min((value, position) for position, value in enumerate(found))[1]
        del columns[worst]


def measures_of(plan: Plan) -> tuple[int, int, int]:
    """Sequences, new tokens and tokens of context of a plan whose tokens are counted as computed already."""
    entries = plan.entries
    return len(entries), plan.num_new_tokens, sum(entry.sequence.num_computed for entry in entries)
