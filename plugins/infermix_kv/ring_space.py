"""Blocks of sliding-window layers: a ring per sequence, whose memory does not grow with the context. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from infermix.errors import Unsupported
from infermix.roles.kv_space import KVUsage
from infermix.toolkit.block_pool import BlockPool


def ring_blocks(window: int, max_query_len: int, block_size: int) -> int:
    """Blocks that hold what `max_query_len` new tokens of one forward see of a `window` that counts the token itself.

    The first new token sees `window - 1` older ones; the last is written `max_query_len - 1` slots further on.
    """
    return -(-(window + max_query_len - 1) // block_size)


class RingSpace:
    """Token p lies in block `(p // block_size) % num_ring` of its sequence's ring, where it overwrites p - capacity.

    The block table repeats the ring, so that addresses, views and kernels work as for any block table, as long as
    nobody reads outside the window. What lies there was written by the same sequence later on: stale for its
    position, never memory that nobody wrote. Rings are overwritten all the time, so forks copy them.

    A reservation is a promise; `wrote` says how far tokens were really written, which decides what may be cut.
    """

    fixed_rows = False
    recompute = False

    def __init__(self, num_blocks: int, block_size: int, num_ring: int, window: int, max_model_len: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_size, self._num_ring, self._window = block_size, num_ring, window
        self._max_model_len = max_model_len
        self._rings: dict[int, array[int]] = {}
        self._tables: dict[int, array[int]] = {}
        self._lengths: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._used_tokens = 0

    @property
    def capacity(self) -> int:
        """Tokens that one ring holds."""
        return self._num_ring * self._block_size

    def can_reserve(self, seq_id: int, num_tokens: int) -> bool:
        return num_tokens <= self._max_model_len and self._missing(seq_id, num_tokens) <= self._pool.num_free

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        if num_tokens <= self._lengths.get(seq_id, 0):
            return True
        if not self.can_reserve(seq_id, num_tokens):
            return False
        blocks = self._pool.allocate(self._missing(seq_id, num_tokens))
        assert blocks is not None
        ring = self._rings.setdefault(seq_id, array("i"))
        ring.extend(blocks)
        self._repeat(self._tables.setdefault(seq_id, array("i")), ring, -(-num_tokens // self._block_size))
        self._written.setdefault(seq_id, 0)
        self._set_length(seq_id, num_tokens)
        return True

    def _missing(self, seq_id: int, num_tokens: int) -> int:
        columns = min(-(-num_tokens // self._block_size), self._num_ring)
        return max(0, columns - len(self._rings.get(seq_id, ())))

    def _repeat(self, table: array[int], ring: array[int], columns: int) -> None:
        table.extend(ring[column % self._num_ring] for column in range(len(table), columns))

    def wrote(self, seq_id: int, num_tokens: int) -> None:
        """A forward writes the sequence up to `num_tokens` tokens."""
        self._written[seq_id] = max(self._written[seq_id], num_tokens)

    def check_cut(self, seq_id: int, num_tokens: int) -> None:
        """Raises `Unsupported` when the token after the cut would see keys that later ones have overwritten."""
        if not self._can_cut(seq_id, num_tokens):
            raise Unsupported(
                f"cannot cut sequence {seq_id} at token {num_tokens}: its window of {self._window} begins before "
                f"token {self.overwritten(seq_id)}, the oldest that a ring of {self.capacity} tokens still holds"
            )

    def _can_cut(self, seq_id: int, num_tokens: int) -> bool:
        return max(0, num_tokens - self._window + 1) >= self.overwritten(seq_id)

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Raises `Unsupported` as `check_cut` does."""
        if num_tokens >= self._lengths[seq_id]:
            return
        self.check_cut(seq_id, num_tokens)
        columns = -(-num_tokens // self._block_size)
        ring = self._rings[seq_id]
        self._pool.release(ring[columns:])
        del ring[columns:]
        del self._tables[seq_id][columns:]
        self._set_length(seq_id, num_tokens)

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        """Every block of the ring is copied; `None` also where the parent has overwritten what the child needs."""
        assert child_id not in self._rings, f"sequence {child_id} already holds blocks"
        length = self._lengths[parent_id] if num_tokens is None else num_tokens
        if not self._can_cut(parent_id, length):
            return None
        ring = self._rings[parent_id]
        own = self._pool.allocate(len(ring))
        if own is None:
            return None
        self._rings[child_id] = array("i", own)
        self._tables[child_id] = array("i")
        self._repeat(self._tables[child_id], self._rings[child_id], len(self._tables[parent_id]))
        self._written[child_id] = self._written[parent_id]
        self._set_length(child_id, self._lengths[parent_id])
        self.truncate(child_id, length)
        return list(zip(ring, self._rings[child_id], strict=False))

    def release(self, seq_id: int) -> None:
        ring = self._rings.pop(seq_id, None)
        if ring is None:
            return
        self._pool.release(ring)
        self._set_length(seq_id, 0)
        del self._tables[seq_id], self._lengths[seq_id], self._written[seq_id]

    def block_table(self, seq_id: int, table: int = 0) -> Sequence[int]:
        return self._tables[seq_id]

    def fits(self, num_tokens: int) -> bool:
        needed = min(-(-num_tokens // self._block_size), self._num_ring)
        return num_tokens <= self._max_model_len and needed <= self._pool.num_blocks

    def usage(self) -> KVUsage:
        size = self._block_size
        return KVUsage(self._pool.num_used * size, self._used_tokens, self._pool.num_blocks * size)

    def overwritten(self, seq_id: int) -> int:
        """Tokens of the sequence that later ones have overwritten."""
        return max(0, self._written[seq_id] - self.capacity)

    def _set_length(self, seq_id: int, num_tokens: int) -> None:
        held = min(self._lengths.get(seq_id, 0), self.capacity)
        self._used_tokens += min(num_tokens, self.capacity) - held
        self._lengths[seq_id] = num_tokens
