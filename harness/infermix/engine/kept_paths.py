"""Accepted paths of draft trees: their K and V move to where the following tokens expect them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infermix.roles.kv_space import KVShape, KVSpace
    from infermix.roles.kv_store import KVStore
    from infermix.roles.request import Sequence


class KeptPaths:
    """Books the moves of all sequences of a step, then makes them at once."""

    def __init__(self, space: KVSpace, store: KVStore, shape: KVShape) -> None:
        self._space, self._shape = space, shape
        self._store: Any = store
        self._moves: list[tuple[list[int], list[int]]] = [([], []) for _ in range(shape.num_tables)]

    def book(self, sequence: Sequence, path: Seq[int]) -> None:
        """Drafts `path` (indices, ascending) of the last step stay; `num_computed` counts them already.

        Must come before the space cuts the sequence, since what moves lies behind the cut.
        """
        first = sequence.num_computed - len(path)
        moved = [(index, place) for place, index in enumerate(path) if index != place]
        if not moved:
            return
        for table, (sources, targets) in enumerate(self._moves):
            blocks = self._space.block_table(sequence.seq_id, table)
            for index, place in moved:
                sources.append(self._slot(blocks, first + index))
                targets.append(self._slot(blocks, first + place))

    def move(self) -> None:
        """Carry out what was booked."""
        for table, (sources, targets) in enumerate(self._moves):
            if sources:
                self._store.move(table, sources, targets)
                sources.clear()
                targets.clear()

    def _slot(self, blocks: Seq[int], place: int) -> int:
        size = self._shape.block_size
        return blocks[place // size] * size + place % size
