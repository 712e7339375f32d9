"""Fixed-size blocks with reference counts. Pure bookkeeping, no torch."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks, ids 0 to `num_blocks - 1`. Every operation is O(1) per block (amortised).

    A block is owned, free, or idle: nobody owns it, but its content was published with `keep`. Idle blocks are handed
    out when no free one is left, the one that lost its last owner first goes first, and `on_evict` is told.

    Prompts of thousands of blocks are let in within a step, so little is done for each: an idle block that is owned
    again stays in the order of eviction until its turn comes, and its ticket tells that it left.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._on_evict = on_evict
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._kept: set[int] = set()
        #: Of idle blocks the number of the release that made them idle; 0 of all others.
        self._tickets = [0] * num_blocks
        self._last_ticket = self._num_idle = 0
        #: (ticket, block) in the order of eviction; of a block whose ticket is another one, not any more.
        self._order: deque[tuple[int, int]] = deque()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, idle ones included."""
        return len(self._free) + self._num_idle

    @property
    def num_idle(self) -> int:
        return self._num_idle

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return self.num_blocks - len(self._free) - self._num_idle

    def allocate(self, count: int) -> array[int] | None:
        """`count` blocks with one reference each; `None` (and no change) when there are not enough."""
        if count > self.num_free:
            return None
        while len(self._free) < count:
            self._free.append(self._evict())
            self.num_evicted += 1
        at, references = len(self._free) - count, self._references
        blocks = self._free[at:]
        del self._free[at:]
        blocks.reverse()
        for block in blocks:
            references[block] = 1
        return blocks

    def incref(self, blocks: Iterable[int]) -> None:
        """One more owner for each block; idle ones are owned again."""
        references, tickets, woken = self._references, self._tickets, 0
        for block in blocks:
            owners = references[block]
            if not owners:
                assert tickets[block], f"block {block} is free"
                tickets[block] = 0
                woken += 1
            references[block] = owners + 1
        self._num_idle -= woken

    def release(self, blocks: Sequence[int]) -> list[int]:
        """One owner less for each block, the last ones first; returns those that nobody owns any more.

        In the order of a block table, idle blocks are therefore evicted from the end of a sequence.
        """
        references, left = self._references, []
        for block in reversed(blocks):
            assert references[block] > 0, f"block {block} is already free"
            references[block] -= 1
            if not references[block]:
                left.append(block)
        if not self._kept:
            self._free.extend(left)
            return left
        self._free.extend(block for block in left if block not in self._kept)
        self._rest([block for block in left if block in self._kept])
        return left

    def references(self, block: int) -> int:
        """Number of owners; 0 when free or idle."""
        return self._references[block]

    def keep(self, blocks: Sequence[int]) -> None:
        """The content of owned blocks is published: it stays when the last owner leaves, until it is evicted."""
        references = self._references
        for block in blocks:
            assert references[block] > 0, f"block {block} is not owned"
        self._kept.update(blocks)

    def is_kept(self, block: int) -> bool:
        return block in self._kept

    def touch(self, block: int) -> None:
        """An idle block was read: it is evicted last."""
        if self._tickets[block]:
            self._num_idle -= 1
            self._rest([block])

    def forget(self, block: int) -> None:
        """The content of an owned block is published no longer; `on_evict` is told."""
        assert self._references[block] > 0, f"block {block} is not owned"
        self._kept.discard(block)
        if self._on_evict is not None:
            self._on_evict(block)

    def drop_idle(self) -> None:
        """All idle blocks become free, as if evicted one after the other."""
        while self._num_idle:
            self._free.append(self._evict())

    def _rest(self, blocks: Sequence[int]) -> None:
        """These blocks are idle, to be evicted after all that are idle already."""
        self._last_ticket = ticket = self._last_ticket + 1
        self._num_idle += len(blocks)
        for block in blocks:
            self._tickets[block] = ticket
            self._order.append((ticket, block))
        if len(self._order) > 2 * self.num_blocks:
            self._order = deque(entry for entry in self._order if self._tickets[entry[1]] == entry[0])

    def _evict(self) -> int:
        ticket, block = self._order.popleft()
        while self._tickets[block] != ticket:
            ticket, block = self._order.popleft()
        self._tickets[block] = 0
        self._num_idle -= 1
        self._kept.discard(block)
        if self._on_evict is not None:
            self._on_evict(block)
        return block
