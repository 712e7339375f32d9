"""One row per sequence, `max_model_len` tokens long: the space of `none`, `concat` and `dense`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from infermix.errors import UserError
from infermix.roles.kv_space import BlockMoves, KVBudget, KVGroup, KVShape, KVUsage
from infermix.toolkit.host_blocks import HostBlocks
from infermix.toolkit.paged_space import bytes_per_token


def row_shape(groups: tuple[KVGroup, ...], budget: KVBudget, *, sink_rows: int, allocates: bool = True) -> KVShape:
    """As many rows as sequences, fewer when `max_bytes` asks for it.

    Raises `UserError` when not even one row fits.
    """
    per_token = bytes_per_token(groups, budget.element_bytes) if allocates else 0.0
    row_bytes = int(per_token * budget.max_model_len)
    rows = budget.max_num_seqs
    if budget.max_bytes is not None and row_bytes:
        rows = min(rows, budget.max_bytes // row_bytes - sink_rows)
    if rows < 1:
        raise UserError(
            f"{budget.max_bytes} bytes of KV memory do not hold one sequence of {budget.max_model_len} tokens",
            key="limits.kv_memory_bytes",
            hint=f"at least {row_bytes * (1 + sink_rows)} bytes are needed",
        )
    return KVShape(
        groups=groups,
        num_blocks=rows,
        block_size=budget.max_model_len,
        max_num_seqs=budget.max_num_seqs,
        max_model_len=budget.max_model_len,
        bytes=row_bytes * (rows + sink_rows),
        bytes_per_token=per_token,
    )


class RowSpace:
    """Row `r` is block `r`. The lowest free row is taken first, so that running rows stay together."""

    recompute = False

    def __init__(self, shape: KVShape, *, fixed_rows: bool, reserves_whole_rows: bool) -> None:
        self.fixed_rows = fixed_rows
        self._shape = shape
        self._reserves_whole_rows = reserves_whole_rows
        self._free = list(range(shape.num_blocks))
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._used_tokens = 0
        self._host = HostBlocks.of(shape)

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        if num_tokens > self._shape.max_model_len:
            return False
        if seq_id not in self._tables and not self._take_row(seq_id):
            return False
        self._set_length(seq_id, max(num_tokens, self._lengths[seq_id]))
        return True

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        self._set_length(seq_id, min(num_tokens, self._lengths[seq_id]))

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        assert child_id not in self._tables, f"sequence {child_id} already holds a row"
        if not self._take_row(child_id):
            return None
        self._set_length(child_id, self._lengths[parent_id] if num_tokens is None else num_tokens)
        return [(self._tables[parent_id][0], self._tables[child_id][0])]

    def release(self, seq_id: int) -> None:
        table = self._tables.pop(seq_id, None)
        if table is None:
            self._host.release(seq_id)
            return
        heapq.heappush(self._free, table[0])
        self._used_tokens -= self._lengths.pop(seq_id)

    def swap_out(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        """The whole row moves, however few tokens it holds."""
        return self._host.swap_out(self, seq_id, num_tokens)

    def swap_in(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        return self._host.swap_in(self, seq_id, num_tokens)

    def block_table(self, seq_id: int, table: int = 0) -> Sequence[int]:
        return self._tables[seq_id]

    def fits(self, num_tokens: int) -> bool:
        return num_tokens <= self._shape.max_model_len

    def steps_for(self, num_seqs: int) -> int:
        """Whole rows are there already."""
        return self._shape.max_model_len

    def usage(self) -> KVUsage:
        allocated = self._used_tokens
        if self._reserves_whole_rows:
            allocated = len(self._tables) * self._shape.block_size
        return KVUsage(allocated, self._used_tokens, self._shape.capacity_tokens, reserved_tokens=self._used_tokens)

    def _take_row(self, seq_id: int) -> bool:
        if not self._free:
            return False
        self._tables[seq_id] = [heapq.heappop(self._free)]
        self._lengths[seq_id] = 0
        return True

    def _set_length(self, seq_id: int, num_tokens: int) -> None:
        self._used_tokens += num_tokens - self._lengths[seq_id]
        self._lengths[seq_id] = num_tokens
