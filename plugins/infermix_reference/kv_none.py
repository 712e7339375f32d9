"""KV layout `none`: nothing is kept; every step computes the whole sequence again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.roles.kv_space import KVBudget, KVGroup, KVShape, KVUsage

from infermix_reference.kv_rows import RowSpace, row_shape

if TYPE_CHECKING:
    from infermix.roles.batch import Batch, GroupBatch
    from infermix.roles.kv_store import RaggedView
    from torch import Tensor


class RecomputeSpace(RowSpace):
    """Bounds the number and length of sequences; holds no memory."""

    recompute = True

    def __init__(self, shape: KVShape) -> None:
        super().__init__(shape, fixed_rows=False, reserves_whole_rows=False)

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        return None if super().fork(parent_id, child_id, num_tokens) is None else []

    def usage(self) -> KVUsage:
        return KVUsage(0, 0, self._shape.capacity_tokens)


class RecomputeStore:
    """Passes the keys and values of the current layer on; they must be those of whole sequences."""

    #: Nothing outlives its layer: those that share keys and values hand them over again.
    forgets = True

    def __init__(self) -> None:
        self._layer_idx = -1
        self._current: tuple[Tensor, Tensor] | None = None

    def write(self, layer_idx: int, k: Tensor, v: Tensor, batch: Batch, group: GroupBatch) -> None:
        assert batch.host_context_lens == batch.query_lens, "kv: none needs whole sequences in every step"
        self._layer_idx, self._current = layer_idx, (k, v)

    def view(self, layer_idx: int, batch: Batch, group: GroupBatch) -> RaggedView:
        from infermix.roles.kv_store import RaggedView

        assert self._current is not None
        assert self._layer_idx == layer_idx
        keys, values = self._current
        return RaggedView(list(keys.split(batch.query_lens)), list(values.split(batch.query_lens)))

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Nothing is kept, so there is nothing to copy."""

    def export_blocks(self, blocks: list[int]) -> list[tuple[Tensor, ...]]:
        return []

    def import_blocks(self, blocks: list[int], data: list[tuple[Tensor, ...]]) -> None:
        assert not data

    def allocated_bytes(self) -> int:
        return 0


class RecomputeLayout:
    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        return row_shape(groups, budget, sink_rows=0, allocates=False)

    def space(self, shape: KVShape) -> RecomputeSpace:
        return RecomputeSpace(shape)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> RecomputeStore:
        return RecomputeStore()
