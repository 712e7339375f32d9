"""KV layout `state`, first half: paged blocks for attention layers, slots of constant size for recurrent ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from infermix.errors import Unsupported, UserError
from infermix.roles.kv_space import BlockMoves, KVBudget, KVGroup, KVShape
from infermix.toolkit.block_pool import BlockPool
from infermix.toolkit.host_blocks import HostBlocks, Tables
from infermix.toolkit.paged_space import PagedSpace, bytes_per_token, paged_shape

if TYPE_CHECKING:
    from infermix_kv.state_store import StateStore


class StateSpace(PagedSpace):
    """A sequence owns a row of `1 + snapshots` state slots for life, whatever its length, beside its blocks.

    The state after n tokens lies in slot n modulo their number, so the last `snapshots` tokens can be taken back.
    Rows are block table 1 (one id repeated); copies name them as `num_blocks + 1 + row`.
    """

    def __init__(self, shape: KVShape) -> None:
        super().__init__(shape)
        self._per_seq = shape.state_slots_per_seq
        self._pool_of_rows = BlockPool(shape.blocks_of(1))
        self._host = HostBlocks.of(shape, self._moved_blocks)
        self._rows: dict[int, int] = {}
        #: Tokens of each sequence whose states are there, from the first to the second number.
        self._states: dict[int, tuple[int, int]] = {}
        self._away: dict[int, tuple[int, int]] = {}

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        if seq_id in self._rows:
            return super().reserve(seq_id, num_tokens)
        if not self._pool_of_rows.num_free or not super().reserve(seq_id, num_tokens):
            return False
        self._begin_row(seq_id, (0, 0))
        return True

    def place(self, seq_id: int, start: int, stop: int) -> int:
        """Nothing is dropped; the row learns which states are written."""
        oldest, _ = self._states[seq_id]
        self._states[seq_id] = max(oldest, stop - self._per_seq + 1), stop
        return 0

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Raises `Unsupported` when no saved state is as old as that."""
        oldest, newest = self._states[seq_id]
        if num_tokens < oldest:
            raise Unsupported(
                f"cannot cut sequence {seq_id} at token {num_tokens}: its oldest state is of token {oldest} "
                f"(kv.snapshots is {self._per_seq - 1})"
            )
        super().truncate(seq_id, num_tokens)
        self._states[seq_id] = oldest, min(newest, num_tokens)

    def oldest(self, seq_id: int) -> int:
        """The least number of tokens to which the sequence can be cut."""
        return self._states[seq_id][0]

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        """The row is copied; `None` also where the parent has no state of `num_tokens` tokens (any more, or yet)."""
        oldest, newest = self._states[parent_id]
        length = self._lengths[parent_id] if num_tokens is None else num_tokens
        if not (oldest <= length <= newest and self._pool_of_rows.num_free):
            return None
        pairs = super().fork(parent_id, child_id, length)
        if pairs is None:
            return None
        self._begin_row(child_id, (oldest, length))
        return [*pairs, (self._row_id(parent_id), self._row_id(child_id))]

    def release(self, seq_id: int) -> None:
        super().release(seq_id)
        self._away.pop(seq_id, None)
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._pool_of_rows.release((row,))
            del self._states[seq_id]

    def swap_out(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        states = self._states[seq_id]
        moves = super().swap_out(seq_id, num_tokens)
        if moves is not None:
            self._away[seq_id] = states
        return moves

    def swap_in(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        moves = super().swap_in(seq_id, num_tokens)
        if moves is not None:
            self._states[seq_id] = self._away.pop(seq_id)
        return moves

    def block_table(self, seq_id: int, table: int = 0) -> Sequence[int]:
        blocks = super().block_table(seq_id)
        return blocks if table == 0 else array("i", [self._rows[seq_id]]) * len(blocks)

    def state_slots(self, seq_id: int) -> Sequence[int]:
        """The sequence's slots; the state after n tokens is in number n modulo their count."""
        first = self._rows[seq_id] * self._per_seq
        return range(first, first + self._per_seq)

    def _begin_row(self, seq_id: int, states: tuple[int, int]) -> None:
        rows = self._pool_of_rows.allocate(1)
        assert rows is not None
        self._rows[seq_id], self._states[seq_id] = rows[0], states

    def _row_id(self, seq_id: int) -> int:
        return self._shape.num_blocks + 1 + self._rows[seq_id]

    def _moved_blocks(self, seq_id: int, num_tokens: int) -> Tables:
        return tuple(self._tables[seq_id][: -(-num_tokens // self._block_size)]), (self._rows[seq_id],)


class StateLayout:
    """`snapshots` states are kept beside the current one, for decoders that take tokens back."""

    form = "state"

    def __init__(self, block_size: int, snapshots: int = 0) -> None:
        self._block_size, self._per_seq = block_size, snapshots + 1

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        """As many sequences as the budget has, or its `max_bytes` hold beside one longest sequence of blocks.

        Raises `UserError` when `max_bytes` does not hold one sequence of `max_model_len` tokens.
        """
        per_seq = self._per_seq * sum(state.bytes(budget.element_bytes) for state in budget.states)
        if groups:
            per_token = bytes_per_token(groups, budget.element_bytes)
            blocks = paged_shape(groups, budget, block_size=self._block_size, per_token=per_token, per_seq=per_seq)
        else:  # a block is bookkeeping only: one per sequence
            fitting = _without_attention(budget, per_seq)
            blocks = paged_shape((), fitting, block_size=budget.max_model_len, per_token=0, per_seq=per_seq)
        return replace(
            blocks,
            states=budget.states,
            num_state_slots=blocks.max_num_seqs * self._per_seq,
            state_slots_per_seq=self._per_seq,
            side_tables=1,
            table_blocks=(blocks.num_blocks, blocks.max_num_seqs),
            table_limits=(None, 1),
            max_truncate=self._per_seq - 1,
        )

    def space(self, shape: KVShape) -> StateSpace:
        return StateSpace(shape)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> StateStore:
        from infermix_kv.state_store import StateStore

        return StateStore(shape, device, dtype)


def _without_attention(budget: KVBudget, per_seq: int) -> KVBudget:
    """The budget with as many sequences as its bytes hold, a sink beside them."""
    if budget.max_bytes is None or not per_seq:
        return replace(budget, max_bytes=None)
    num_seqs = min(budget.max_num_seqs, budget.max_bytes // per_seq - 1)
    if num_seqs < 1:
        raise UserError(
            f"{budget.max_bytes} bytes of KV memory do not hold the states of one sequence",
            key="limits.kv_memory_bytes",
            hint=f"at least {2 * per_seq} bytes are needed",
        )
    return replace(budget, max_num_seqs=num_seqs, max_bytes=None)
