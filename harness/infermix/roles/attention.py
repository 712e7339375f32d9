"""Role: attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from infermix.roles.batch import Batch
    from infermix.roles.kv_store import View


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    """What one attention layer asks for. `window` counts the query's own token; `sinks [H]` are extra logits.

    `kv_from` is the layer whose keys and values this one reads, where a model shares them across layers.
    """

    layer_idx: int
    group: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    kv_from: int | None = None


class AttentionBackend(Protocol):
    """Computes attention of new tokens over everything in the cache.

    Must be free of host reads, allocations that depend on values, and Python branches on tensor values when
    `batch.captured`; a backend that cannot do so declares `graph:no`.
    """

    #: View classes that the backend reads without the gather adapter.
    reads: tuple[type, ...]

    def forward(self, q: Tensor, view: View, batch: Batch, layer: LayerSpec) -> Tensor:
        """`q [T, H, Dk]` -> `[T, H, Dv]`; causal; rows of padded sequences come back as zeros.

        Raises `Unsupported` for anything in `layer` that it does not implement.
        """
        ...
