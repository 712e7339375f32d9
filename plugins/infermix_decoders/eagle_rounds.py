"""How rounds of guessing are run: as many rows as there are texts, or padded to few shapes, replayed from graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from infermix.roles.decoder import Captured
from torch import Tensor

from infermix_decoders.eagle_round import GuessingRound
from infermix_decoders.lane_rows import lists_to_device, on_host

#: Graphs of one drafter, at most: each takes a tenth of a second or so to capture.
MOST_GRAPHS = 12
#: Fewer places than this are not worth a shape of their own.
LEAST_REACH = 256

#: `rounds(lanes, counts, positions) -> [B, 2, num_nodes]`: `GuessingRound` from lists of the host. The result is to
#: be read before the next round.
Rounds = Callable[[Seq[int], Seq[int], Seq[int]], Tensor]


class PlainRounds:
    """Each as large as it must be, launched operator by operator."""

    def __init__(self, guess: GuessingRound, device: torch.device) -> None:
        self.guess, self._device = guess, device

    def __call__(self, lanes: Seq[int], counts: Seq[int], positions: Seq[int]) -> Tensor:
        rows, seen, nexts = lists_to_device(self._device, lanes, counts, positions)
        return self.guess(rows, seen, nexts, max(counts) + self.guess.room)


@dataclass(frozen=True, slots=True)
class RoundShapes:
    """Numbers of rows and of places, ascending, that rounds are padded to."""

    batches: tuple[int, ...]
    reaches: tuple[int, ...]

    @classmethod
    def up_to(cls, max_num_seqs: int, capacity: int, most: int = MOST_GRAPHS) -> RoundShapes:
        """Powers of two, of which every other one is left out, of the longer list, until no more than `most` pairs
        are left. The smallest and the largest stay: any round fits in one of them.
        """
        batches, reaches = _powers(1, max_num_seqs), _powers(LEAST_REACH, capacity)
        while len(batches) * len(reaches) > most:
            if len(batches) > len(reaches):
                batches = _thinned(batches)
            else:
                reaches = _thinned(reaches)
        return cls(batches, reaches)

    def holding(self, num_rows: int, num_places: int) -> tuple[int, int]:
        """The smallest rows and places that hold so many."""
        batch = next(size for size in self.batches if size >= num_rows)
        return batch, next(size for size in self.reaches if size >= num_places)


class PaddedRounds:
    """Rounds of few shapes that read their rows from one place on the device.

    A row of padding has lane 0, of which it sees nothing; nobody reads its tree. Until `capture_all` a round is
    launched operator by operator, from then on replayed.
    """

    def __init__(self, guess: GuessingRound, shapes: RoundShapes, device: torch.device) -> None:
        self.guess, self.shapes, self._device = guess, shapes, device
        self._given = torch.zeros(3 * shapes.batches[-1], dtype=torch.int64, device=device)
        self._captured: dict[tuple[int, int], Captured] = {}

    def capture_all(self, capture: Callable[[Callable[[], Any]], Captured]) -> Iterator[float]:
        """Capture every shape, the largest first so that the others reuse its memory; yields the fraction done.

        Raises `Unsupported` where a round cannot be captured.
        """
        shapes = sorted(product(self.shapes.batches, self.shapes.reaches), reverse=True)
        for done, shape in enumerate(shapes):
            self._captured[shape] = capture(partial(self._guessed, *shape))
            yield (done + 1) / len(shapes)

    def __call__(self, lanes: Seq[int], counts: Seq[int], positions: Seq[int]) -> Tensor:
        batch, reach = self.shapes.holding(len(lanes), max(counts) + self.guess.room)
        padding = [0] * (batch - len(lanes))
        rows = list(chain(lanes, padding, counts, padding, positions, padding))
        self._given[: len(rows)].copy_(on_host(rows, self._device), non_blocking=True)
        return self.run(batch, reach)[: len(lanes)]

    def run(self, batch: int, reach: int) -> Tensor:
        """A round of this shape over the rows that lie on the device."""
        if not self._captured:
            return self._guessed(batch, reach)
        captured = self._captured[batch, reach]
        captured.replay()
        return captured.result

    def _guessed(self, batch: int, reach: int) -> Tensor:
        lanes, counts, positions = self._given[: 3 * batch].split(batch)
        return self.guess(lanes, counts, positions, reach)


def _powers(first: int, last: int) -> tuple[int, ...]:
    """`first` times powers of two below `last`, and `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def _thinned(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({sizes[0], *sizes[::-2]}))
