"""KV layout `concat`: one tensor per sequence and layer that grows by concatenation. The textbook baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.roles.kv_space import KVBudget, KVGroup, KVShape

from infermix_reference.kv_rows import RowSpace, row_shape

if TYPE_CHECKING:
    from infermix_reference.concat_store import ConcatStore


class ConcatLayout:
    """`KVShape.bytes` is the most that it grows to; an ended sequence's memory goes when its row is used again."""

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        return row_shape(groups, budget, sink_rows=0)

    def space(self, shape: KVShape) -> RowSpace:
        return RowSpace(shape, fixed_rows=False, reserves_whole_rows=False)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> ConcatStore:
        from infermix_reference.concat_store import ConcatStore

        return ConcatStore(shape, device, dtype)
