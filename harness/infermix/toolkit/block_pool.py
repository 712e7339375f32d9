"""Fixed-size blocks with reference counts. Pure bookkeeping, no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """`num_blocks` blocks, ids 0 to `num_blocks - 1`. Every operation is O(1) per block.

    A block is owned, free, or idle: nobody owns it, but its content was published with `keep`. Idle blocks are handed
    out when no free one is left, the one that lost its last owner first goes first, and `on_evict` is told.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._kept: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return self.num_blocks - len(self._free) - len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each; `None` (and no change) when there are not enough."""
        if count > self.num_free:
            return None
        while len(self._free) < count:
            self._free.append(self._evict())
            self.num_evicted += 1
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def incref(self, blocks: Iterable[int]) -> None:
        """One more owner for each block; idle ones are owned again."""
        references, idle = self._references, self._idle
        for block in blocks:
            if not references[block]:
                assert block in idle, f"block {block} is free"
                del idle[block]
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """One owner less for each block, the last ones first; returns those that nobody owns any more.

        In the order of a block table, idle blocks are therefore evicted from the end of a sequence.
        """
        references, left = self._references, []
        for block in reversed(list(blocks)):
            assert references[block] > 0, f"block {block} is already free"
            references[block] -= 1
            if not references[block]:
                left.append(block)
        if not self._kept:
            self._free.extend(left)
            return left
        for block in left:
            if block in self._kept:
                self._idle[block] = None
            else:
                self._free.append(block)
        return left

    def references(self, block: int) -> int:
        """Number of owners; 0 when free or idle."""
        return self._references[block]

    def keep(self, block: int) -> None:
        """The content of an owned block is published: it stays when its last owner leaves, until it is evicted."""
        assert self._references[block] > 0, f"block {block} is not owned"
        self._kept.add(block)

    def is_kept(self, block: int) -> bool:
        return block in self._kept

    def touch(self, block: int) -> None:
        """An idle block was read: it is evicted last."""
        if block in self._idle:
            self._idle.move_to_end(block)

    def forget(self, block: int) -> None:
        """The content of an owned block is published no longer; `on_evict` is told."""
        assert self._references[block] > 0, f"block {block} is not owned"
        self._kept.discard(block)
        if self._on_evict is not None:
            self._on_evict(block)

    def drop_idle(self) -> None:
        """All idle blocks become free, as if evicted one after the other."""
        while self._idle:
            self._free.append(self._evict())

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._kept.discard(block)
        if self._on_evict is not None:
            self._on_evict(block)
        return block
