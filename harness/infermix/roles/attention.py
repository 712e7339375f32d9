"""Role: attention backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from infermix.roles.batch import Batch
    from infermix.roles.kv_store import View


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    """What one attention layer asks for. `window` counts the query's own token; `sinks [H]` are extra logits.

    `kv_from` is the layer whose keys and values this one reads, where a model shares them across layers. Where not
    `causal`, a token sees the whole context of its sequence, the tokens behind it included; only for backends that
    provide `attn:noncausal`.
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
    causal: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class TuneContext:
    """What attention will be asked to compute: the model's layers over blocks of `block_size` tokens.

    `block_size` is 0 for dense rows. `folder` is where measured parameters are kept, a file per machine.
    """

    layers: tuple[LayerSpec, ...]
    block_size: int
    device: str
    dtype: str
    max_num_seqs: int
    max_model_len: int
    folder: Path
    progress: Callable[[str, float], None] = lambda phase, fraction: None


class AttentionBackend(Protocol):
    """Computes attention of new tokens over everything in the cache.

    May have a method `tune(context: TuneContext) -> Mapping[str, Any]`: it measures launch parameters that this
    machine's files do not hold yet, in set-up, where the experiment asks for it (`engine.tune: auto`), and returns
    facts for the record.

    Must be free of host reads, allocations that depend on values, and Python branches on tensor values when
    `batch.captured`; a backend that cannot do so declares `graph:no`.
    """

    #: View classes that the backend reads without the gather adapter.
    reads: tuple[type, ...]

    def forward(self, q: Tensor, view: View, batch: Batch, layer: LayerSpec) -> Tensor:
        """`q [T, H, Dk]` -> `[T, H, Dv]`; causal (see `LayerSpec.causal`), or what `batch.tree_mask` says where a
        backend provides `attn:tree_mask`; rows of padded sequences come back as zeros.

        Raises `Unsupported` for anything in `layer` that it does not implement.
        """
        ...
