"""The bookkeeping of beam search for one request: scores, finished hypotheses, when to stop. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A continuation of beam `beam` by `token`; `score` is the sum of log-probabilities."""

    score: float
    beam: int
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output; `score` is its sum of log-probabilities over its length to the power of the penalty."""

    score: float
    tokens: tuple[int, ...]


class BeamSearch:
    """Keeps the `num_beams` best unfinished outputs, and the `num_beams` best finished ones.

    A step offers the best `num_candidates` continuations of all beams. Those that end an output among the first
    `num_beams` are finished; the best others go on. It is over when `early_stopping` is set and `num_beams` outputs
    are finished, when no beam can do better than the worst of those (by its score at its length now; with "never", at
    the length that suits it best), or at `max_new_tokens`. These are the rules of transformers' `generate`.
    """

    def __init__(
        self,
        num_beams: int,
        *,
        max_new_tokens: int,
        stops: frozenset[int],
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self._num_beams, self._max, self._stops = num_beams, max_new_tokens, stops
        self._penalty, self._early = length_penalty, early_stopping
        self._improvable = True
        self.num_candidates = max(2, 1 + len(stops)) * num_beams
        self.outputs: list[tuple[int, ...]] = [()]
        self.scores: list[float] = [0.0]
        self.finished: list[Hypothesis] = []
        self.done = False

    @property
    def length(self) -> int:
        """Tokens of every beam so far."""
        return len(self.outputs[0])

    def advance(self, candidates: Seq[Candidate]) -> list[Candidate]:
        """Take the best continuations, in falling order of their scores; returns those that become the beams."""
        length = self.length + 1
        ends = [each.token in self._stops or length >= self._max for each in candidates]
        self._finish([each for each, end in zip(candidates[: self._num_beams], ends, strict=False) if end], length)
        going = [each for each, end in zip(candidates, ends, strict=True) if not end][: self._num_beams]
        self.outputs = [(*self.outputs[each.beam], each.token) for each in going] or self.outputs
        self.scores = [each.score for each in going]
        full = len(self.finished) == self._num_beams
        if full and going:
            best = self._normalised(going[0].score, self._longest(length))
            self._improvable &= best > self.finished[-1].score
        self.done = not going or not self._improvable or (full and self._early is True)
        return going

    def _finish(self, ended: Seq[Candidate], length: int) -> None:
        found = [
            Hypothesis(self._normalised(each.score, length), (*self.outputs[each.beam], each.token)) for each in ended
        ]
        merged = sorted([*self.finished, *found], key=lambda each: -each.score)
        self.finished = merged[: self._num_beams]

    def _normalised(self, score: float, length: int) -> float:
        return score / length**self._penalty

    def _longest(self, length: int) -> int:
        return self._max if self._early == "never" and self._penalty > 0 else length
