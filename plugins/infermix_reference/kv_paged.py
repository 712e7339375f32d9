"""KV layout `paged`: blocks from one pool, a block table per sequence, shared between forks and by equal prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.roles.kv_space import KVBudget, KVGroup, KVShape
from infermix.toolkit.paged_space import PagedSpace, bytes_per_token, paged_shape
from infermix.toolkit.prefix_index import HashIndex
from infermix.toolkit.prefix_space import PrefixPagedSpace
from infermix.toolkit.radix_index import RadixIndex

if TYPE_CHECKING:
    from infermix.toolkit.pool_store import PagedStore


class PagedLayout:
    """`prefix_cache` is off, hash (`toolkit.prefix_index.HashIndex`) or radix (`toolkit.radix_index.RadixIndex`)."""

    def __init__(self, block_size: int, prefix_cache: str = "off", *, keep_between_repeats: bool = False) -> None:
        self._block_size = block_size
        self._prefix_cache, self._keeps = prefix_cache, keep_between_repeats

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        """Raises `UserError` when `max_bytes` does not hold one sequence of `max_model_len` tokens."""
        per_token = bytes_per_token(groups, budget.element_bytes)
        return paged_shape(groups, budget, block_size=self._block_size, per_token=per_token)

    def space(self, shape: KVShape) -> PagedSpace:
        if self._prefix_cache == "off":
            return PagedSpace(shape)
        index = (RadixIndex if self._prefix_cache == "radix" else HashIndex)(shape.block_size)
        return PrefixPagedSpace(shape, index, keep_between_repeats=self._keeps)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> PagedStore:
        from infermix.toolkit.pool_store import PagedStore

        return PagedStore(shape, device, dtype)
