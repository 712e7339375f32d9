"""KV layout `kivi`: 4 or 2 bits in KIVI's arrangement, with a full-precision tail of recent tokens.

Liu et al. 2024 (arXiv:2402.02750): keys have a few channels of large magnitude, so a key channel shares scale and
zero point over a group of tokens; values have none, so a value shares them over a group of its channels. A group of
tokens can only be quantized when it is complete: until then, and as long as it is recent, it stays in the tail.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from infermix.errors import Unsupported, UserError
from infermix.roles.kv_space import BlockMoves, KVBudget, KVGroup, KVShape
from infermix.toolkit.paged_space import PagedSpace, bytes_per_token, paged_shape

from infermix_kv.kivi_rule import KiviRule

if TYPE_CHECKING:
    from infermix_kv.kivi_store import KiviStore

#: Scale and zero point of a group, fp16 each.
_GROUP_BYTES = 4


class KiviLayout:
    """`bits` 4 or 2; `block_size` a multiple of `group_size`; `residual_length` at least two groups."""

    def __init__(self, bits: int, group_size: int, residual_length: int, block_size: int) -> None:
        self._bits, self._block_size = bits, block_size
        self._rule = KiviRule(group_size, residual_length)

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        """Raises `UserError` when the heads do not divide into groups and bytes, or `max_bytes` is too small."""
        for group in groups:
            self._check_widths(group)
        shape = paged_shape(
            groups,
            budget,
            block_size=self._block_size,
            per_token=sum(map(self._bytes_per_token, groups)),
            per_seq=int(bytes_per_token(groups, budget.element_bytes)) * self._rule.capacity,
        )
        return replace(
            shape,
            side_tables=1,
            table_blocks=(shape.num_blocks, shape.max_num_seqs),
            table_limits=(None, 1),
            max_truncate=self._rule.max_truncate,
        )

    def space(self, shape: KVShape) -> KiviSpace:
        return KiviSpace(shape, self._rule)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> KiviStore:
        from infermix_kv.kivi_store import KiviStore

        return KiviStore(shape, device, dtype, self._bits, self._rule)

    def _bytes_per_token(self, group: KVGroup) -> float:
        numbers = group.bytes_per_token(self._bits / 8)
        return numbers + group.bytes_per_token(_GROUP_BYTES) / self._rule.group_size

    def _check_widths(self, group: KVGroup) -> None:
        size, per_byte = self._rule.group_size, 8 // self._bits
        if group.value_dim % size:
            fitting = ", ".join(str(n) for n in range(2, group.value_dim + 1) if group.value_dim % n == 0)
            raise UserError(
                f"group_size {size} of kv 'kivi' does not divide the {group.value_dim} channels of a value head",
                key="parts.kv.group_size",
                hint=f"sizes that fit: {fitting}",
            )
        for dim in (group.key_dim, group.value_dim):
            if dim % per_byte:
                raise UserError(
                    f"kv 'kivi' packs {per_byte} numbers of {self._bits} bits in a byte, which heads of {dim} do not "
                    "fill",
                    key="parts.kv.bits",
                )


class KiviSpace(PagedSpace):
    """Blocks of quantized tokens as table 0, and a row of the tail for each sequence as table 1 (one id repeated).

    Copies name rows of the tail as `num_blocks + 1 + row`. A block that forks share may be quantized again by each of
    them: from the same tokens to the same bytes.
    """

    def __init__(self, shape: KVShape, rule: KiviRule) -> None:
        super().__init__(shape)
        self._rule = rule
        self._free_rows = list(range(shape.max_num_seqs))
        self._rows: dict[int, int] = {}
        #: Tokens up to which forwards have written the tail, cut ones included.
        self._highest: dict[int, int] = {}
        self._swapped: dict[int, int] = {}

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        if seq_id not in self._rows and not self._free_rows:
            return False
        if not super().reserve(seq_id, num_tokens):
            return False
        if seq_id not in self._rows:
            self._rows[seq_id], self._highest[seq_id] = heapq.heappop(self._free_rows), 0
        return True

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Raises `Unsupported` when the tail no longer holds tokens that are in no quantized group after the cut."""
        if not self._can_cut(seq_id, num_tokens):
            raise Unsupported(
                f"kv 'kivi' cannot cut sequence {seq_id} from {self._highest[seq_id]} to {num_tokens} tokens: its "
                f"tail of {self._rule.capacity} takes back {self._rule.max_truncate}; raise residual_length"
            )
        super().truncate(seq_id, num_tokens)

    def place(self, seq_id: int, start: int, stop: int) -> int:
        """Nothing is dropped; the tail learns how far it is written. A reservation alone writes nothing."""
        self._highest[seq_id] = max(self._highest[seq_id], stop)
        return 0

    def _can_cut(self, seq_id: int, num_tokens: int) -> bool:
        overwritten = self._highest[seq_id] - self._rule.capacity
        return self._rule.num_flushed(num_tokens) >= min(overwritten, num_tokens)

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        length = self._lengths[parent_id] if num_tokens is None else num_tokens
        if not self._free_rows or not self._can_cut(parent_id, length):
            return None
        pairs = super().fork(parent_id, child_id, num_tokens)
        if pairs is None:
            return None
        self._rows[child_id] = heapq.heappop(self._free_rows)
        self._highest[child_id] = self._highest[parent_id]
        return [*pairs, (self._row_id(parent_id), self._row_id(child_id))]

    def release(self, seq_id: int) -> None:
        super().release(seq_id)
        self._swapped.pop(seq_id, None)
        row = self._rows.pop(seq_id, None)
        if row is not None:
            del self._highest[seq_id]
            heapq.heappush(self._free_rows, row)

    def swap_out(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        highest = self._highest[seq_id]
        moves = super().swap_out(seq_id, num_tokens)
        if moves is not None:
            self._swapped[seq_id] = highest
        return moves

    def swap_in(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        moves = super().swap_in(seq_id, num_tokens)
        if moves is not None:
            self._highest[seq_id] = max(self._highest[seq_id], self._swapped.pop(seq_id))
        return moves

    def block_table(self, seq_id: int, table: int = 0) -> Sequence[int]:
        blocks = super().block_table(seq_id)
        return blocks if table == 0 else array("i", [self._rows[seq_id]]) * len(blocks)

    def _row_id(self, seq_id: int) -> int:
        return self._shape.num_blocks + 1 + self._rows[seq_id]
