"""KV layout `paged`: blocks from one pool, a block table per sequence, full blocks shared between forks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.roles.kv_space import KVBudget, KVGroup, KVShape
from infermix.toolkit.paged_space import PagedSpace, bytes_per_token, paged_shape

if TYPE_CHECKING:
    from infermix.toolkit.pool_store import PagedStore


class PagedLayout:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        """Raises `UserError` when `max_bytes` does not hold one sequence of `max_model_len` tokens."""
        per_token = bytes_per_token(groups, budget.element_bytes)
        return paged_shape(groups, budget, block_size=self._block_size, per_token=per_token)

    def space(self, shape: KVShape) -> PagedSpace:
        return PagedSpace(shape)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> PagedStore:
        from infermix.toolkit.pool_store import PagedStore

        return PagedStore(shape, device, dtype)
