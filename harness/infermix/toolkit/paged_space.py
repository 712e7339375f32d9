"""Ownership of fixed-size blocks, a block table per sequence, blocks shared between forks. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from infermix.errors import UserError
from infermix.roles.kv_space import BlockMoves, KVBudget, KVGroup, KVShape, KVUsage
from infermix.toolkit.block_copies import BlockCopies
from infermix.toolkit.block_pool import BlockPool
from infermix.toolkit.host_blocks import HostBlocks

if TYPE_CHECKING:
    from infermix.roles.scheduler import Scheduled


def bytes_per_token(groups: tuple[KVGroup, ...], element_bytes: float) -> float:
    return sum(group.bytes_per_token(element_bytes) for group in groups)


def paged_shape(
    groups: tuple[KVGroup, ...], budget: KVBudget, *, block_size: int, per_token: float, per_seq: int = 0
) -> KVShape:
    """Blocks for `max_num_seqs` sequences of `max_model_len` tokens, fewer where `max_bytes` asks for it.

    `per_token`, `per_seq` are bytes; each sequence, and the sink, costs the latter besides its tokens. Raises
    `UserError` when `max_bytes` does not hold one sequence of `max_model_len` tokens.
    """
    block_bytes = int(per_token * block_size)
    blocks_each = -(-budget.max_model_len // block_size)
    num_seqs, num_blocks = budget.max_num_seqs, blocks_each * budget.max_num_seqs
    if budget.max_bytes is not None and block_bytes:
        room = budget.max_bytes - per_seq - block_bytes
        if per_seq:
            num_seqs = max(1, min(num_seqs, (room - blocks_each * block_bytes) // per_seq))
        num_blocks = min(num_blocks, (room - num_seqs * per_seq) // block_bytes)
        num_seqs = min(num_seqs, max(num_blocks, 1))  # every sequence needs a block
    if num_blocks < blocks_each:
        raise UserError(
            f"{budget.max_bytes} bytes of KV memory do not hold one sequence of {budget.max_model_len} tokens",
            key="limits.kv_memory_bytes",
            hint=f"at least {block_bytes * (blocks_each + 1) + 2 * per_seq} bytes are needed",
        )
    return KVShape(
        groups=groups,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=num_seqs,
        max_model_len=budget.max_model_len,
        bytes=block_bytes * (num_blocks + 1) + per_seq * (num_seqs + 1),
        bytes_per_token=per_token,
        bytes_per_seq=per_seq,
    )


class PagedSpace:
    """Block ownership with copy-on-write (`roles.kv_prefix.SharingSpace`).

    A full block may have several owners. A fork copies the partial last block at once, since parent and child write
    it next; a sequence that is cut inside a block which is not its own alone copies it when it grows again.

    Tables are arrays, not lists: packing copies them into a batch by the thousand.
    """

    fixed_rows = False
    recompute = False

    def __init__(self, shape: KVShape, on_evict: Callable[[int], None] | None = None) -> None:
        self._shape = shape
        self._block_size = shape.block_size
        self._pool = BlockPool(shape.num_blocks, on_evict)
        self._copies = BlockCopies()
        self._host = HostBlocks.of(shape)
        self._tables: dict[int, array[int]] = {}
        self._lengths: dict[int, int] = {}
        #: Sequences cut inside a block that may have other owners.
        self._cut: set[int] = set()
        self._num_reserved = 0
        self._num_unused = 0

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        length = self._lengths.get(seq_id, 0)
        if num_tokens <= length:
            return True
        if num_tokens > self._shape.max_model_len:
            return False
        table = self._tables.get(seq_id)
        missing = -(-num_tokens // self._block_size) - (len(table) if table else 0)
        if seq_id in self._cut and not self._own_tail(seq_id, missing):
            return False
        if missing > 0:
            blocks = self._pool.allocate(missing)
            if blocks is None:
                return False
            if table is None:
                self._tables[seq_id] = array("i", blocks)
            else:
                table.extend(blocks)
        self._lengths[seq_id] = num_tokens
        self._num_reserved += num_tokens - length
        self._num_unused += missing * self._block_size - (num_tokens - length)
        return True

    def reserve_next(self, entries: Sequence[Scheduled]) -> int:
        """Most sequences find room in their last block, and nothing else has to be looked at."""
        lengths, tables, size, cut = self._lengths, self._tables, self._block_size, self._cut
        more = served = 0
        for entry in entries:
            seq = entry.sequence
            seq_id, wanted = seq.seq_id, seq.num_computed + 1
            length = lengths[seq_id]
            if wanted > length:
                if wanted <= len(tables[seq_id]) * size and seq_id not in cut:
                    lengths[seq_id] = wanted
                    more += wanted - length
                elif not self.reserve(seq_id, wanted):
                    break
            served += 1
        self._num_reserved += more
        self._num_unused -= more
        return served

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        length, table = self._lengths[seq_id], self._tables[seq_id]
        if num_tokens >= length:
            return
        kept = -(-num_tokens // self._block_size)
        self._num_unused -= self._tail(seq_id)
        self._give_back(table[kept:])
        del table[kept:]
        self._lengths[seq_id] = num_tokens
        self._num_reserved -= length - num_tokens
        self._cut.discard(seq_id)
        if num_tokens % self._block_size and self._is_shared(table[-1]):
            self._cut.add(seq_id)
        self._num_unused += self._tail(seq_id)

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        assert child_id not in self._tables, f"sequence {child_id} already holds blocks"
        table, length = self._tables[parent_id], self._lengths[parent_id]
        if num_tokens is not None:
            assert num_tokens <= length, f"sequence {parent_id} holds {length} tokens, not {num_tokens}"
            length = num_tokens
        num_full, partial = divmod(length, self._block_size)
        own = self._pool.allocate(1 if partial else 0)
        if own is None:
            return None
        shared = table[:num_full]
        self._pool.incref(shared)
        if own:
            self._copies.book(table[num_full], own[0])
        self._begin(child_id, shared + array("i", own), length)
        return self.take_copies()

    def take_copies(self) -> list[tuple[int, int]]:
        return self._copies.take()

    def release(self, seq_id: int) -> None:
        table = self._tables.get(seq_id)
        if table is None:
            self._host.release(seq_id)
            return
        self._num_unused -= self._tail(seq_id)
        self._give_back(table)
        del self._tables[seq_id]
        self._num_reserved -= self._lengths.pop(seq_id)
        self._cut.discard(seq_id)

    def swap_out(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        """Shared blocks are saved as well: the sequence comes back with blocks of its own."""
        if self._copies.is_target(self._tables[seq_id]):
            return None  # what it would save is not there yet
        return self._host.swap_out(self, seq_id, num_tokens)

    def swap_in(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        return self._host.swap_in(self, seq_id, num_tokens)

    def block_table(self, seq_id: int, table: int = 0) -> Sequence[int]:
        return self._tables[seq_id]

    def fits(self, num_tokens: int) -> bool:
        limit = min(self._shape.max_model_len, self._shape.capacity_tokens)
        return num_tokens <= limit

    def steps_for(self, num_seqs: int) -> int:
        """As many tokens as a block has take at most one block each; a cut sequence may need one more."""
        return self._pool.num_free // num_seqs * self._block_size if num_seqs and not self._cut else 0

    def usage(self) -> KVUsage:
        allocated = self._pool.num_used * self._block_size
        return KVUsage(
            allocated, allocated - self._num_unused, self._shape.capacity_tokens, reserved_tokens=self._num_reserved
        )

    def counters(self) -> dict[str, float]:
        return {"kv_copied_blocks": float(self._copies.num_booked)}

    def reset_counters(self) -> None:
        self._copies.num_booked = 0

    def _begin(self, seq_id: int, table: array[int], length: int) -> None:
        """Enter a sequence whose blocks are referenced already."""
        self._tables[seq_id] = table
        self._lengths[seq_id] = length
        self._num_reserved += length
        self._num_unused += self._tail(seq_id)

    def _tail(self, seq_id: int) -> int:
        """Slots of the sequence's last block that hold none of its tokens; 0 where others may use them."""
        if seq_id in self._cut:
            return 0
        return len(self._tables[seq_id]) * self._block_size - self._lengths[seq_id]

    def _is_shared(self, block: int) -> bool:
        return self._pool.references(block) > 1 or self._pool.is_kept(block)

    def _own_tail(self, seq_id: int, missing: int) -> bool:
        """Make the last block of a cut sequence its own, if `missing` more blocks can be had besides."""
        table, pool = self._tables[seq_id], self._pool
        last = table[-1]
        if self._is_shared(last):
            if pool.num_free <= missing:
                if pool.references(last) > 1 or pool.num_free < missing:
                    return False
                # It is published, but nobody else holds it: without idle blocks behind it, it can be taken back.
                pool.drop_idle()
                pool.forget(last)
            else:
                own = pool.allocate(1)
                assert own is not None
                self._copies.book(last, own[0])
                table[-1] = own[0]
                self._give_back((last,))
        elif pool.num_free < missing:
            return False
        self._cut.discard(seq_id)
        self._num_unused += self._tail(seq_id)
        return True

    def _give_back(self, blocks: Sequence[int]) -> None:
        self._copies.cancel(self._pool.release(blocks))
