"""Which blocks of host memory hold swapped-out sequences. Pure bookkeeping, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from infermix.errors import UserError
from infermix.roles.kv_space import BlockMoves, KVShape, KVSpace
from infermix.toolkit.block_pool import BlockPool

Tables = tuple[tuple[int, ...], ...]


def with_host_blocks(shape: KVShape, swap_bytes: int, engines: int = 1) -> KVShape:
    """`shape` with the host blocks that `swap_bytes`, shared by so many engines, hold for one of them.

    Of every table that is the same share of its pool.

    There are at most as many as sequences can have in use. Raises `UserError` when some table gets not even one.
    """
    if not shape.bytes:
        return shape
    sizes = [shape.blocks_of(table) + 1 for table in range(shape.num_tables)]
    counts = [swap_bytes * size // (engines * shape.bytes) for size in sizes]
    if not all(counts):
        raise UserError(
            f"{swap_bytes} bytes of host memory do not hold one block of KV" + _for_each(engines),
            key="limits.kv_swap_bytes",
            hint=f"at least {-(-engines * shape.bytes // min(sizes))} bytes are needed",
        )
    most = (shape.max_num_seqs * shape.most_blocks_of(table) for table in range(shape.num_tables))
    return replace(shape, host_blocks=tuple(map(min, counts, most)))


def _for_each(engines: int) -> str:
    return f" for each of {engines} engines" if engines > 1 else ""


class HostBlocks:
    """`swap_out` and `swap_in` of a space, over its own `block_table`, `release` and `reserve`.

    `counts[t]` blocks of table t fit the host; `sinks[t]` is its sink. Suits spaces whose tables are a function of
    the number of tokens reserved. A table may repeat blocks (a ring) and name the sink: each real block moves once.
    Where its sequences hold other blocks than the first of their tables, `blocks_of(seq_id, num_tokens)` names them.
    """

    def __init__(
        self,
        counts: Sequence[int],
        block_size: int,
        sinks: Sequence[int],
        blocks_of: Callable[[int, int], Tables] | None = None,
    ) -> None:
        self._pools = [BlockPool(count) for count in counts]
        self._block_size, self._sinks, self._blocks_of = block_size, sinks, blocks_of
        self._held: dict[int, tuple[int, Tables]] = {}

    @classmethod
    def of(cls, shape: KVShape, blocks_of: Callable[[int, int], Tables] | None = None) -> HostBlocks:
        tables = range(shape.num_tables)
        counts = [shape.host_blocks_of(table) for table in tables]
        return cls(counts, shape.block_size, [shape.blocks_of(table) for table in tables], blocks_of)

    def saved_tokens(self, seq_id: int) -> int:
        """Tokens of a swapped-out sequence."""
        return self._held[seq_id][0]

    @property
    def num_used(self) -> int:
        return sum(pool.num_used for pool in self._pools)

    def swap_out(self, space: KVSpace, seq_id: int, num_tokens: int) -> BlockMoves | None:
        if not num_tokens:
            return None
        device = self._blocks(space, seq_id, num_tokens)
        host = self._take(device)
        if host is None:
            return None
        space.release(seq_id)
        self._held[seq_id] = num_tokens, host
        return BlockMoves(seq_id, True, device, host)

    def swap_in(self, space: KVSpace, seq_id: int, num_tokens: int) -> BlockMoves | None:
        saved, host = self._held[seq_id]
        assert num_tokens >= saved, f"{saved} tokens of sequence {seq_id} were saved, room for {num_tokens} is asked"
        if not space.reserve(seq_id, num_tokens):
            return None
        device = self._blocks(space, seq_id, saved)
        assert list(map(len, device)) == list(map(len, host)), f"sequence {seq_id} came back with other tables"
        self.release(seq_id)
        return BlockMoves(seq_id, False, device, host)

    def release(self, seq_id: int) -> None:
        """Give back the host blocks of a sequence; unknown ids are ignored."""
        held = self._held.pop(seq_id, None)
        if held is not None:
            for pool, blocks in zip(self._pools, held[1], strict=True):
                pool.release(blocks)

    def _blocks(self, space: KVSpace, seq_id: int, num_tokens: int) -> Tables:
        """Per table, the distinct blocks that hold the first `num_tokens` tokens."""
        if self._blocks_of is not None:
            return self._blocks_of(seq_id, num_tokens)
        count = -(-num_tokens // self._block_size)
        return tuple(
            tuple(block for block in dict.fromkeys(space.block_table(seq_id, number)[:count]) if block != sink)
            for number, sink in enumerate(self._sinks)
        )

    def _take(self, wanted: Tables) -> Tables | None:
        """As many host blocks per table as `wanted` names; `None` (and no change) when one table has too few."""
        if any(len(blocks) > pool.num_free for pool, blocks in zip(self._pools, wanted, strict=True)):
            return None
        taken = (pool.allocate(len(blocks)) for pool, blocks in zip(self._pools, wanted, strict=True))
        return tuple(tuple(blocks) for blocks in taken if blocks is not None)
