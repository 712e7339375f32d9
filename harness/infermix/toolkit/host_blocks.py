"""Which blocks of host memory hold swapped-out sequences. Pure bookkeeping, no torch."""

from __future__ import annotations

from dataclasses import replace

from infermix.errors import UserError
from infermix.roles.kv_space import BlockMoves, KVShape, KVSpace
from infermix.toolkit.block_pool import BlockPool

Tables = tuple[tuple[int, ...], ...]


def with_host_blocks(shape: KVShape, swap_bytes: int) -> KVShape:
    """`shape` with as many host blocks as `swap_bytes` hold, at most one for every block that can be in use.

    Raises `UserError` when not even one block fits.
    """
    if not shape.bytes:
        return shape
    count = swap_bytes * (shape.num_blocks + 1) // shape.bytes
    if not count:
        raise UserError(
            f"{swap_bytes} bytes of host memory do not hold one block of KV",
            key="limits.kv_swap_bytes",
            hint=f"at least {-(-shape.bytes // (shape.num_blocks + 1))} bytes are needed",
        )
    return replace(shape, num_host_blocks=min(count, shape.max_num_seqs * shape.blocks_per_seq))


class HostBlocks:
    """`swap_out` and `swap_in` of a space, over its own `block_table`, `release` and `reserve`.

    Suits spaces whose table is a function of the number of tokens reserved. A table may repeat blocks (a ring) and
    name the sink: each real block is moved once.
    """

    def __init__(self, num_blocks: int, block_size: int, *, num_tables: int = 1, sink_block: int = -1) -> None:
        self._pools = [BlockPool(num_blocks) for _ in range(num_tables)]
        self._block_size, self._sink_block = block_size, sink_block
        self._held: dict[int, tuple[int, Tables]] = {}

    @classmethod
    def of(cls, shape: KVShape) -> HostBlocks:
        return cls(shape.num_host_blocks, shape.block_size, num_tables=shape.num_tables, sink_block=shape.sink_block)

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
        count = -(-num_tokens // self._block_size)
        tables = (space.block_table(seq_id, number)[:count] for number in range(len(self._pools)))
        return tuple(tuple(block for block in dict.fromkeys(table) if block != self._sink_block) for table in tables)

    def _take(self, wanted: Tables) -> Tables | None:
        """As many host blocks per table as `wanted` names; `None` (and no change) when one table has too few."""
        if any(len(blocks) > pool.num_free for pool, blocks in zip(self._pools, wanted, strict=True)):
            return None
        taken = (pool.allocate(len(blocks)) for pool, blocks in zip(self._pools, wanted, strict=True))
        return tuple(tuple(blocks) for blocks in taken if blocks is not None)
