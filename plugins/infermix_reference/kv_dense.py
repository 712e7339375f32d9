"""KV layout `dense`: rows of `max_model_len` tokens, allocated in advance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.roles.kv_space import KVBudget, KVGroup, KVShape

from infermix_reference.kv_rows import RowSpace, row_shape

if TYPE_CHECKING:
    from infermix.toolkit.pool_store import DenseStore


class DenseLayout:
    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        return row_shape(groups, budget, sink_rows=1)

    def space(self, shape: KVShape) -> RowSpace:
        return RowSpace(shape, fixed_rows=True, reserves_whole_rows=True)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> DenseStore:
        from infermix.toolkit.pool_store import DenseStore

        return DenseStore(shape, device, dtype)
