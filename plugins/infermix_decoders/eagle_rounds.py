"""How rounds of guessing are run: as many rows as there are texts, or padded to few shapes, replayed from graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from infermix_decoders.eagle_round import GuessingRound
from infermix_decoders.lane_rows import lists_to_device, on_host
from infermix_decoders.replayed import MOST_GRAPHS, Replayed, holding, powers, thinned

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
        batches, reaches = powers(1, max_num_seqs), powers(LEAST_REACH, capacity)
        while len(batches) * len(reaches) > most:
            if len(batches) > len(reaches):
                batches = thinned(batches)
            else:
                reaches = thinned(reaches)
        return cls(batches, reaches)

    def holding(self, num_rows: int, num_places: int) -> tuple[int, int]:
        """The smallest rows and places that hold so many."""
        return holding(self.batches, num_rows), holding(self.reaches, num_places)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return product(self.batches, self.reaches)


class PaddedRounds(Replayed):
    """Rounds of few shapes that read their rows from one place on the device.

    A row of padding has lane 0, of which it sees nothing; nobody reads its tree. Behind the rows there is room for
    `beside` numbers per row of others, who may send both in one copy (`lists`, `sent`).
    """

    def __init__(self, guess: GuessingRound, shapes: RoundShapes, device: torch.device, beside: int = 0) -> None:
        super().__init__(shapes)
        self.shapes = shapes
        self.guess, self._device = guess, device
        given = torch.zeros((3 + beside) * shapes.batches[-1], dtype=torch.int64, device=device)
        #: For each batch: the rows and what lies beside them; the rows alone.
        self.places = {batch: given[: (3 + beside) * batch] for batch in shapes.batches}
        self._given = {batch: given[: 3 * batch] for batch in shapes.batches}
        #: The rows that lie there, as they were asked for.
        self.sent: tuple[Seq[int], Seq[int], Seq[int]] | None = None

    def __call__(self, lanes: Seq[int], counts: Seq[int], positions: Seq[int]) -> Tensor:
        batch, reach = self.shapes.holding(len(lanes), max(counts) + self.guess.room)
        if self.sent != (lanes, counts, positions):
            rows = on_host(self.lists(batch, lanes, counts, positions), self._device)
            self._given[batch].copy_(rows, non_blocking=True)
            self.sent = lanes, counts, positions
        trees: Tensor = self.run(batch, reach)
        return trees[: len(lanes)] if len(lanes) < batch else trees

    def work(self, *shape: int) -> Tensor:
        batch, reach = shape
        lanes, counts, positions = self._given[batch].split(batch)
        return self.guess(lanes, counts, positions, reach)

    @staticmethod
    def lists(batch: int, lanes: Seq[int], counts: Seq[int], positions: Seq[int]) -> list[int]:
        """Padded, in the order in which they lie on the device."""
        padding = [0] * (batch - len(lanes))
        return [*lanes, *padding, *counts, *padding, *positions, *padding]
