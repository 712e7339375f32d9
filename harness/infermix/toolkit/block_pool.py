"""Fixed-size blocks with reference counts. Pure bookkeeping, no torch."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """`num_blocks` blocks, ids 0 to `num_blocks - 1`. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each; `None` (and no change) when there are not enough."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def incref(self, blocks: Iterable[int]) -> None:
        """One more owner for each block."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """One owner less for each block; returns the blocks that became free."""
        freed = []
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is already free"
            self._references[block] -= 1
            if not self._references[block]:
                freed.append(block)
        self._free.extend(freed)
        return freed

    def references(self, block: int) -> int:
        """Number of owners; 0 when free."""
        return self._references[block]
