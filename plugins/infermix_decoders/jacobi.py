"""Jacobi decoding: guesses are refined by the target itself (Santilli et al., 2023, "Accelerating Transformer
Inference for Translation via Parallel Decoding").

A step computes the target's tokens at a window of positions from the guesses before them; the tokens computed behind
the first wrong guess are the guesses of the next step, so that the window moves towards the fixed point, which is the
target's own text. With noise that belongs to positions the same holds for sampled text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from infermix.roles.request import Sequence


class JacobiGuesses:
    """Proposes a full window: what the target said at these positions last time, then the last known token."""

    def __init__(self) -> None:
        self._guesses: dict[int, list[int]] = {}

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        known = self._guesses.get(sequence.seq_id, [])[:limit]
        last = (known or sequence.tokens)[-1]
        return [*known, *[last] * (limit - len(known))]

    def observe(self, sequence: Sequence, draws: Seq[int], num_emitted: int) -> None:
        self._guesses[sequence.seq_id] = list(draws[num_emitted:])

    def forget(self, sequence: Sequence) -> None:
        self._guesses.pop(sequence.seq_id, None)
