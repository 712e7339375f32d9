"""Block copies that are booked now and made before the next forward."""

from __future__ import annotations

from collections.abc import Iterable


class BlockCopies:
    """Pairs for one `KVStore.copy`, which reads every source before it writes any target.

    Nothing was written since the first one was booked, so a source may have been given away meanwhile: what it holds
    is still what was meant. A target that is itself a source stands for the block that it is to be copied from.
    """

    def __init__(self) -> None:
        self.num_booked = 0
        self._source: dict[int, int] = {}

    def book(self, source: int, target: int) -> None:
        self._source[target] = self._source.get(source, source)
        self.num_booked += 1

    def cancel(self, blocks: Iterable[int]) -> None:
        """These blocks were given back: copies into them are not needed any more."""
        if self._source:
            for block in blocks:
                self._source.pop(block, None)

    def is_target(self, blocks: Iterable[int]) -> bool:
        """Whether a copy into one of these blocks is booked."""
        return bool(self._source) and any(block in self._source for block in blocks)

    def take(self) -> list[tuple[int, int]]:
        """(source, target) pairs booked since the last call."""
        pairs = [(source, target) for target, source in self._source.items()]
        self._source.clear()
        return pairs
