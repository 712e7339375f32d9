"""What a lossy KV layout costs by itself: the same logits, written and read in the plainest way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from infermix.toolkit.plain_attention import plain_attention

if TYPE_CHECKING:
    from torch import Tensor

    from infermix.roles.attention import LayerSpec
    from infermix.roles.batch import Batch, GroupBatch
    from infermix.roles.kv_space import KVBudget, KVGroup, KVLayout, KVShape, KVSpace


class PlainAttention:
    """Attention in fp64, one sequence at a time, over whatever a view gives back. Cannot be captured."""

    reads: tuple[type, ...] = ()

    def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
        assert batch.host_context_lens is not None
        rows = [
            _attend(part, view.sequence(index, context), layer)
            for index, (part, context) in enumerate(
                zip(q.split(batch.query_lens), batch.host_context_lens, strict=True)
            )
        ]
        return torch.cat(rows).to(q.dtype)


def _attend(q: Tensor, read: tuple[Tensor, Tensor], layer: LayerSpec) -> Tensor:
    return plain_attention(q, read[0], read[1], layer)


@dataclass(frozen=True)
class PlainlyWritten:
    """A layout whose store is written by its own `write` alone: no rotated keys on a short cut to its pools."""

    layout: KVLayout

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        return self.layout.shape(groups, budget)

    def space(self, shape: KVShape) -> KVSpace:
        return self.layout.space(shape)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> Any:
        return _WriteOnly(self.layout.store(shape, device, dtype))


@dataclass(frozen=True)
class _WriteOnly:
    hidden: Any

    def write(self, layer_idx: int, k: Tensor, v: Tensor, batch: Batch, group: GroupBatch) -> None:
        self.hidden.write(layer_idx, k, v, batch, group)

    def view(self, layer_idx: int, batch: Batch, group: GroupBatch) -> Any:
        return self.hidden.view(layer_idx, batch, group)
