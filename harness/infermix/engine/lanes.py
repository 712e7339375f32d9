"""Lanes: rows of the engine's persistent device buffers, one per sequence that holds sampled state."""

from __future__ import annotations

from collections.abc import Iterable

from infermix.roles.request import Sequence


class Lanes:
    """Hands out the lowest free lane; lane `count` is the sink of padded rows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def sink(self) -> int:
        return self.count

    def assign(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if sequence.lane < 0:
                assert self._free, "more sequences are running than the engine has lanes"
                sequence.lane = self._free.pop()

    def release(self, sequence: Sequence) -> None:
        if sequence.lane >= 0:
            self._free.append(sequence.lane)
            sequence.lane = -1
