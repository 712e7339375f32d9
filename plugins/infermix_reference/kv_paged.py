"""KV layout `paged`: blocks from one pool, a block table per sequence, full blocks shared between forks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.errors import UserError
from infermix.roles.kv_space import KVBudget, KVGroup, KVShape
from infermix.toolkit.paged_space import PagedSpace, bytes_per_token

if TYPE_CHECKING:
    from infermix.toolkit.pool_store import PagedStore


class PagedLayout:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        """Raises `UserError` when `max_bytes` does not hold one sequence of `max_model_len` tokens."""
        per_token = bytes_per_token(groups, budget.element_bytes)
        block_bytes = int(per_token * self._block_size)
        per_seq = -(-budget.max_model_len // self._block_size)
        num_blocks = per_seq * budget.max_num_seqs
        if budget.max_bytes is not None and block_bytes:
            num_blocks = min(num_blocks, budget.max_bytes // block_bytes - 1)
        if num_blocks < per_seq:
            raise UserError(
                f"{budget.max_bytes} bytes of KV memory do not hold one sequence of {budget.max_model_len} tokens",
                key="limits.kv_memory_bytes",
                hint=f"at least {block_bytes * (per_seq + 1)} bytes are needed",
            )
        return KVShape(
            groups=groups,
            num_blocks=num_blocks,
            block_size=self._block_size,
            max_num_seqs=budget.max_num_seqs,
            max_model_len=budget.max_model_len,
            bytes=block_bytes * (num_blocks + 1),
            bytes_per_token=per_token,
        )

    def space(self, shape: KVShape) -> PagedSpace:
        return PagedSpace(shape)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> PagedStore:
        from infermix.toolkit.pool_store import PagedStore

        return PagedStore(shape, device, dtype)
