"""The bookkeeping of beam search for one request: scores, finished hypotheses, when to stop. No torch."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

EarlyStopping = bool | Literal["never"]


def num_candidates(num_beams: int, num_stops: int) -> int:
    """Continuations that leave enough beams however many of them end."""
    return max(2, 1 + num_stops) * num_beams


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

    `length` is how many tokens are output. The texts of the beams are kept by whoever asks.
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
        self.num_candidates = num_candidates(num_beams, len(stops))
        self.length = 0
        self.scores: list[float] = [0.0]
        self.finished: list[Hypothesis] = []
        self.done = False

    def goes_on(self, scores: list[float], tokens: list[int]) -> bool:
        """Take the `num_beams` best continuations as the new beams, where nothing ends, as in most steps."""
        length = self.length + 1
        if length >= self._max or len(self.finished) == self._num_beams or not self._stops.isdisjoint(tokens):
            return False
        self.length, self.scores = length, scores
        return True

    def advance(
        self, scores: list[float], beams: list[int], tokens: list[int], output: Callable[[int], Seq[int]]
    ) -> tuple[list[int], list[int]]:
        """Take the best continuations, in falling order of their scores: of beam `beams[i]` by `tokens[i]`.

        `scores` are sums of log-probabilities, `output(i)` is what beam i has written so far. Returns for every new
        beam which of the old ones it continues, and by which token.
        """
        best = slice(self._num_beams)
        if self.goes_on(scores[best], tokens[best]):
            return beams[best], tokens[best]
        self.length += 1
        going = self._sort_out(scores, beams, tokens, output)
        self.scores = [scores[place] for place in going]
        full = len(self.finished) == self._num_beams
        if full and going:
            best_score = self._normalised(self.scores[0], self._longest(self.length))
            self._improvable &= best_score > self.finished[-1].score
        self.done = not going or not self._improvable or (full and self._early is True)
        return [beams[place] for place in going], [tokens[place] for place in going]

    def _sort_out(
        self, scores: Seq[float], beams: Seq[int], tokens: Seq[int], output: Callable[[int], Seq[int]]
    ) -> Seq[int]:
        """Finish what ends; the places of those that become the beams come back."""
        best = range(min(self._num_beams, len(tokens)))
        last = self.length >= self._max
        if not last and self._stops.isdisjoint(tokens[: self._num_beams]):
            return best
        ends = [last or token in self._stops for token in tokens]
        self._finish([(scores[place], (*output(beams[place]), tokens[place])) for place in best if ends[place]])
        return [place for place, end in enumerate(ends) if not end][: self._num_beams]

    def _finish(self, ended: Seq[tuple[float, tuple[int, ...]]]) -> None:
        """Score and output of each."""
        found = [Hypothesis(self._normalised(score, self.length), tokens) for score, tokens in ended]
        merged = sorted([*self.finished, *found], key=lambda each: -each.score)
        self.finished = merged[: self._num_beams]

    def _normalised(self, score: float, length: int) -> float:
        return score / length**self._penalty

    def _longest(self, length: int) -> int:
        return self._max if self._early == "never" and self._penalty > 0 else length
