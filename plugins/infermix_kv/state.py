"""KV layout `state`, first half: paged blocks for attention layers, slots of constant size for recurrent ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from infermix.errors import Unsupported, UserError
from infermix.roles.kv_space import KVBudget, KVGroup, KVShape
from infermix.toolkit.block_pool import BlockPool
from infermix.toolkit.paged_space import PagedSpace, bytes_per_token, paged_shape

if TYPE_CHECKING:
    from infermix_kv.state_store import StateStore


class StateSpace(PagedSpace):
    """A sequence owns `1 + snapshots` state slots for life, whatever its length, beside its blocks.

    The state after n tokens lies in slot n modulo their number, so the last `snapshots` tokens can be taken back.
    """

    def __init__(self, shape: KVShape) -> None:
        super().__init__(shape)
        self._per_seq = shape.state_slots_per_seq
        self._slots = BlockPool(shape.num_state_slots)
        self._held: dict[int, Sequence[int]] = {}
        self._oldest: dict[int, int] = {}

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        known = seq_id in self._held
        slots = self._held[seq_id] if known else self._slots.allocate(self._per_seq)
        if slots is None:
            return False
        if not super().reserve(seq_id, num_tokens):
            if not known:
                self._slots.release(slots)
            return False
        # a prompt leaves one state, that of its end; tokens after it leave one each
        kept = num_tokens - self._per_seq + 1 if known else num_tokens
        self._oldest[seq_id] = max(self._oldest.get(seq_id, 0), kept)
        self._held[seq_id] = slots
        return True

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Raises `Unsupported` when no saved state is as old as that."""
        oldest = self.oldest(seq_id)
        if num_tokens < oldest:
            raise Unsupported(
                f"cannot cut sequence {seq_id} at token {num_tokens}: its oldest state is of token {oldest} "
                f"(kv.snapshots is {self._per_seq - 1})"
            )
        super().truncate(seq_id, num_tokens)

    def oldest(self, seq_id: int) -> int:
        """The least number of tokens to which the sequence can be cut."""
        return self._oldest[seq_id]

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        raise Unsupported("recurrent states are not shared between sequences: kv 'state' cannot fork")

    def release(self, seq_id: int) -> None:
        super().release(seq_id)
        slots = self._held.pop(seq_id, None)
        if slots is not None:
            self._slots.release(slots)
            del self._oldest[seq_id]

    def state_slots(self, seq_id: int) -> Sequence[int]:
        """The sequence's slots; the state after n tokens is in number n modulo their count."""
        return self._held[seq_id]


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
