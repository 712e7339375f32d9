"""Ownership of fixed-size blocks, a block table per sequence, full blocks shared between forks. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from infermix.errors import Unsupported, UserError
from infermix.roles.kv_space import BlockMoves, KVBudget, KVGroup, KVShape, KVUsage
from infermix.toolkit.block_pool import BlockPool
from infermix.toolkit.host_blocks import HostBlocks


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
    """Block ownership. A full block may have several owners; the partial last one has exactly one.

    Tables are arrays, not lists: packing copies them into a batch by the thousand.
    """

    fixed_rows = False
    recompute = False

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self._block_size = shape.block_size
        self._pool = BlockPool(shape.num_blocks)
        self._host = HostBlocks.of(shape)
        self._tables: dict[int, array[int]] = {}
        self._lengths: dict[int, int] = {}
        self._used_tokens = 0

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        length = self._lengths.get(seq_id, 0)
        if num_tokens <= length:
            return True
        if num_tokens > self._shape.max_model_len:
            return False
        table = self._tables.get(seq_id)
        missing = -(-num_tokens // self._block_size) - (len(table) if table else 0)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            if blocks is None:
                return False
            if table is None:
                self._tables[seq_id] = array("i", blocks)
            else:
                table.extend(blocks)
        self._lengths[seq_id] = num_tokens
        self._used_tokens += num_tokens - length
        return True

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Raises `Unsupported` when the cut falls inside a block that another sequence owns too."""
        length, table = self._lengths[seq_id], self._tables[seq_id]
        if num_tokens >= length:
            return
        kept = -(-num_tokens // self._block_size)
        if num_tokens % self._block_size and self._pool.references(table[kept - 1]) > 1:
            raise Unsupported(f"cannot cut sequence {seq_id} at token {num_tokens}: its block is shared")
        self._give_back(table[kept:], kept, length)
        if kept:
            self._used_tokens -= min(length, kept * self._block_size) - num_tokens
        del table[kept:]
        self._lengths[seq_id] = num_tokens

    def fork(self, parent_id: int, child_id: int) -> list[tuple[int, int]] | None:
        assert child_id not in self._tables, f"sequence {child_id} already holds blocks"
        table, length = self._tables[parent_id], self._lengths[parent_id]
        num_full, partial = divmod(length, self._block_size)
        own = self._pool.allocate(1 if partial else 0)
        if own is None:
            return None
        shared = table[:num_full]
        self._pool.incref(shared)
        self._tables[child_id] = shared + array("i", own)
        self._lengths[child_id] = length
        self._used_tokens += partial
        return [(table[num_full], own[0])] if own else []

    def release(self, seq_id: int) -> None:
        table = self._tables.pop(seq_id, None)
        if table is not None:
            self._give_back(table, 0, self._lengths.pop(seq_id))
        else:
            self._host.release(seq_id)

    def swap_out(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        """Shared blocks are saved as well: the sequence comes back with blocks of its own."""
        return self._host.swap_out(self, seq_id, num_tokens)

    def swap_in(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        return self._host.swap_in(self, seq_id, num_tokens)

    def block_table(self, seq_id: int, table: int = 0) -> Sequence[int]:
        return self._tables[seq_id]

    def fits(self, num_tokens: int) -> bool:
        limit = min(self._shape.max_model_len, self._shape.capacity_tokens)
        return num_tokens <= limit

    def usage(self) -> KVUsage:
        return KVUsage(self._pool.num_used * self._block_size, self._used_tokens, self._shape.capacity_tokens)

    def _give_back(self, blocks: Sequence[int], first_index: int, length: int) -> None:
        """Drop blocks `first_index`... of a sequence of `length` tokens; only freed ones stop counting as used."""
        if not blocks:
            return
        freed = self._pool.release(blocks)
        self._used_tokens -= len(freed) * self._block_size
        last_tokens = length - (first_index + len(blocks) - 1) * self._block_size
        if freed and freed[-1] == blocks[-1]:
            self._used_tokens += self._block_size - last_tokens
