"""KV layouts `hybrid` and `windowed`: each layer gets the blocks that its config asks for. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from infermix.errors import UserError
from infermix.roles.kv_space import BlockMoves, KVBudget, KVGroup, KVShape, KVUsage
from infermix.toolkit.host_blocks import HostBlocks
from infermix.toolkit.paged_space import PagedSpace, bytes_per_token

from infermix_kv.ring_space import RingSpace, ring_blocks

if TYPE_CHECKING:
    from infermix_kv.hybrid_store import HybridStore


@dataclass(frozen=True)
class _Table:
    """One block table: what a block takes over all layers that use it, and its ring (`None`: grows with tokens)."""

    window: int | None
    ring: int | None
    block_bytes: int

    def needed(self, per_seq: int) -> int:
        """Blocks of one longest sequence."""
        return per_seq if self.ring is None else self.ring


class HybridLayout:
    """Layers without a window are paged; layers with one share a ring of blocks per sequence and window.

    A ring that would not be shorter than the longest sequence is paged as well. Lossless: what a ring overwrites, no
    query sees any more.
    """

    def __init__(self, block_size: int, max_chunk_tokens: int, windows_only: bool = False) -> None:
        self._block_size, self._max_chunk_tokens = block_size, max_chunk_tokens
        self._windows_only = windows_only

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        """Raises `UserError` when `max_bytes` does not hold one sequence of `max_model_len` tokens."""
        self._refuse_full_layers(groups)
        query_len = min(budget.max_query_len or budget.max_model_len, self._max_chunk_tokens, budget.max_model_len)
        per_seq = -(-budget.max_model_len // self._block_size)
        tables, group_tables = self._tables(groups, budget, query_len, per_seq)
        blocks = _pool_sizes(tables, per_seq, budget)
        return KVShape(
            groups=groups,
            num_blocks=blocks[0],
            block_size=self._block_size,
            max_num_seqs=budget.max_num_seqs,
            max_model_len=budget.max_model_len,
            bytes=_total_bytes(tables, blocks),
            bytes_per_token=bytes_per_token(groups, budget.element_bytes),
            group_tables=group_tables,
            table_blocks=blocks,
            table_limits=tuple(table.ring for table in tables),
            max_query_len=query_len if any(table.ring for table in tables) else None,
        )

    def space(self, shape: KVShape) -> HybridSpace:
        return HybridSpace(shape)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> HybridStore:
        from infermix_kv.hybrid_store import HybridStore

        return HybridStore(shape, device, dtype)

    def _refuse_full_layers(self, groups: Iterable[KVGroup]) -> None:
        full = sum(len(group.layers) for group in groups if group.window is None)
        if self._windows_only and full:
            raise UserError(
                f"{full} layers of the model have no sliding window, so their memory grows with the context",
                key="parts.kv",
                hint="kv: hybrid pages those layers, kv: sink_window cuts them",
            )

    def _tables(
        self, groups: tuple[KVGroup, ...], budget: KVBudget, query_len: int, per_seq: int
    ) -> tuple[tuple[_Table, ...], tuple[int, ...]]:
        """The tables, the paged one first where there is one, and the table of each group."""

        def window_of(group: KVGroup) -> int | None:
            short = group.window is not None and ring_blocks(group.window, query_len, self._block_size) < per_seq
            return group.window if short else None

        windows = sorted({window_of(group) for group in groups}, key=lambda window: (window is not None, window or 0))
        tables = []
        for window in windows:
            members = tuple(group for group in groups if window_of(group) == window)
            block_bytes = int(bytes_per_token(members, budget.element_bytes) * self._block_size)
            ring = None if window is None else ring_blocks(window, query_len, self._block_size)
            tables.append(_Table(window, ring, block_bytes))
        return tuple(tables), tuple(windows.index(window_of(group)) for group in groups)


def _pool_sizes(tables: Sequence[_Table], per_seq: int, budget: KVBudget) -> tuple[int, ...]:
    """Blocks of each pool: for all sequences at their longest, or what `max_bytes` holds.

    No ring needs more blocks than its tokens fill, nor more than its own; so under a limit every table gets the same
    number, and rings stop at a ring per sequence. Rings for fewer sequences are made only where otherwise not one
    sequence would fit.
    """
    limit = budget.max_bytes
    least = max(table.needed(per_seq) for table in tables)

    def sizes(count: int, num_rings: int) -> tuple[int, ...]:
        seqs = (budget.max_num_seqs if table.ring is None else num_rings for table in tables)
        return tuple(min(count, table.needed(per_seq) * num) for table, num in zip(tables, seqs, strict=True))

    def holds(count: int, num_rings: int) -> bool:
        return limit is None or _total_bytes(tables, sizes(count, num_rings)) <= limit

    rings = _largest(lambda num_rings: holds(least, num_rings), budget.max_num_seqs)
    if not rings:
        raise UserError(
            f"{limit} bytes of KV memory do not hold one sequence of {budget.max_model_len} tokens",
            key="limits.kv_memory_bytes",
            hint=f"at least {_total_bytes(tables, sizes(least, 1))} bytes are needed",
        )
    return sizes(_largest(lambda count: holds(count, rings), least * budget.max_num_seqs), rings)


def _total_bytes(tables: Sequence[_Table], blocks: Sequence[int]) -> int:
    """The sink block of each pool included."""
    return sum(table.block_bytes * (count + 1) for table, count in zip(tables, blocks, strict=True))


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which `holds`, 0 when there is none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def table_bases(shape: KVShape) -> list[int]:
    """Where the block ids of each table begin when all pools, sinks included, are numbered through."""
    return [0, *accumulate(shape.blocks_of(number) + 1 for number in range(shape.num_tables))][:-1]


class HybridSpace:
    """A space per block table, at most one of them paged; a reservation holds in all of them or in none.

    `fork` numbers the blocks of all pools through (`table_bases`); `HybridStore.copy` reads them so.
    """

    fixed_rows = False
    recompute = False

    def __init__(self, shape: KVShape) -> None:
        windows = {shape.table_of(index): group.window for index, group in enumerate(shape.groups)}
        self._spaces = [_space(shape, number, windows[number]) for number in range(shape.num_tables)]
        self._paged = next((space for space in self._spaces if isinstance(space, PagedSpace)), None)
        self._rings = [space for space in self._spaces if isinstance(space, RingSpace)]
        self._bases = table_bases(shape)
        self._lengths: dict[int, int] = {}
        self._host = HostBlocks.of(shape)
        self.reset_counters()

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        if not all(ring.can_reserve(seq_id, num_tokens) for ring in self._rings):
            return False
        if self._paged is not None and not self._paged.reserve(seq_id, num_tokens):
            return False
        for ring in self._rings:
            ring.reserve(seq_id, num_tokens)
        self._lengths[seq_id] = max(self._lengths.get(seq_id, 0), num_tokens)
        return True

    def place(self, seq_id: int, start: int, stop: int) -> int:
        """Nothing is dropped; rings learn how far they are written."""
        for ring in self._rings:
            ring.wrote(seq_id, stop)
        return 0

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Raises `Unsupported` when a ring no longer holds what the next token sees."""
        if num_tokens >= self._lengths[seq_id]:
            return
        for ring in self._rings:
            ring.check_cut(seq_id, num_tokens)
        for space in self._spaces:
            space.truncate(seq_id, num_tokens)
        self._lengths[seq_id] = num_tokens

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        """The paged table comes last: the copies that it has booked before are handed out only when all can fork."""
        pairs: list[tuple[int, int]] = []
        for space, base in sorted(
            zip(self._spaces, self._bases, strict=True), key=lambda each: each[0] is self._paged
        ):
            copies = space.fork(parent_id, child_id, num_tokens)
            if copies is None:
                for other in self._spaces:
                    other.release(child_id)
                return None
            pairs += [(source + base, target + base) for source, target in copies]
        self._lengths[child_id] = self._lengths[parent_id] if num_tokens is None else num_tokens
        return pairs

    def take_copies(self) -> list[tuple[int, int]]:
        """Those of the paged table; rings are copied whole by `fork`."""
        if self._paged is None:
            return []
        base = self._bases[self._spaces.index(self._paged)]
        return [(source + base, target + base) for source, target in self._paged.take_copies()]

    def release(self, seq_id: int) -> None:
        if seq_id in self._lengths:
            self._count(seq_id, self._lengths.pop(seq_id))
        for space in self._spaces:
            space.release(seq_id)
        self._host.release(seq_id)

    def swap_out(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        """Of a ring, the blocks that its tokens fill; a swapped sequence has not ended, so counters wait."""
        length = self._lengths.pop(seq_id)
        moves = self._host.swap_out(self, seq_id, num_tokens)
        if moves is None:
            self._lengths[seq_id] = length
        return moves

    def swap_in(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        saved = self._host.saved_tokens(seq_id)
        moves = self._host.swap_in(self, seq_id, num_tokens)
        if moves is not None:
            self.place(seq_id, 0, saved)
        return moves

    def block_table(self, seq_id: int, table: int = 0) -> Sequence[int]:
        return self._spaces[table].block_table(seq_id)

    def fits(self, num_tokens: int) -> bool:
        return all(space.fits(num_tokens) for space in self._spaces)

    def usage(self) -> KVUsage:
        """Slots of all tables together."""
        parts = [space.usage() for space in self._spaces]
        return KVUsage(
            sum(part.allocated_tokens for part in parts),
            sum(part.used_tokens for part in parts),
            sum(part.capacity_tokens for part in parts),
        )

    def counters(self) -> dict[str, float]:
        """Of sequences that ended: tokens times tables, and of those the ones that rings have overwritten."""
        return {"kv_stored_slots": self._stored, "kv_overwritten_slots": self._overwritten}

    def reset_counters(self) -> None:
        self._stored = self._overwritten = 0.0

    def _count(self, seq_id: int, num_tokens: int) -> None:
        self._stored += num_tokens * len(self._spaces)
        self._overwritten += sum(ring.overwritten(seq_id) for ring in self._rings)


def _space(shape: KVShape, number: int, window: int | None) -> PagedSpace | RingSpace:
    ring, blocks = shape.table_limits[number], shape.blocks_of(number)
    if ring is None:
        return PagedSpace(replace(shape, num_blocks=blocks))
    assert window is not None
    return RingSpace(blocks, shape.block_size, ring, window, shape.max_model_len)
