"""What is known about a model and a machine without loading either. Sizes in bytes, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int8": 1, "float8_e4m3fn": 1}

LayerKind = Literal["attention", "recurrent", "other"]

SourceKind = Literal["safetensors", "gguf", "dummy"]


@dataclass(frozen=True)
class ResolvedSource:
    """A model source found on disk (or in the hub's cache): what the facts reader and every engine load from.

    `directory` holds config, tokenizer and safetensors files (for a GGUF: its parent); `file` is the `.gguf` file.
    `config` is the `config.json` content with the experiment's overrides applied (empty for a GGUF). `repo_id` is the
    Hugging Face id of a hub model, whose weights may not be on disk yet (`cost.source.fetch_weights`).
    """

    label: str
    kind: SourceKind
    directory: Path
    file: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    trust_remote_code: bool = False
    repo_id: str | None = None


@dataclass(frozen=True)
class StateTensor:
    """One tensor of constant size that a recurrent layer keeps per sequence, `shape` without the batch dimension.

    `dtype` is set where the model keeps it in that dtype whatever the model's own is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None

    def bytes(self, element_bytes: int) -> int:
        size = DTYPE_BYTES[self.dtype] if self.dtype else element_bytes
        return math.prod(self.shape) * size


@dataclass(frozen=True)
class LayerFacts:
    """One decoder layer as far as KV, attention and cost are concerned.

    `window` is the sliding window in tokens (`None`: full attention). `kv_from` is the layer whose K and V this one
    reads when the model shares them across layers. `latent_dim` and `rope_dim` are the widths of the compressed row
    and of the rotary key of multi-head latent attention (MLA), 0 elsewhere. `states` are what a recurrent layer keeps
    per sequence (a layer may attend and recur). `num_experts` is 0 for a dense MLP.
    """

    kind: LayerKind
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    kv_from: int | None = None
    num_experts: int = 0
    num_experts_per_token: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    states: tuple[StateTensor, ...] = ()


@dataclass(frozen=True)
class MatrixFacts:
    """`count` equal matrices `[out_features, in_features]`.

    `kind` says when they are read: `attention`, `mlp`, `expert` (only the ones hit), `shared_expert`, `router`,
    `lm_head`, `embedding` (one row a token).
    """

    kind: str
    in_features: int
    out_features: int
    count: int
    experts: int = 0
    experts_per_token: int = 0

    @property
    def parameters(self) -> int:
        return self.in_features * self.out_features * self.count


@dataclass(frozen=True)
class ModelFacts:
    """Facts read from `config.json`, safetensors and GGUF headers.

    `weight_bytes` is what the weights take once loaded in `dtype`, before any quantizer. `features` are what the
    architecture demands of the parts (`attn:sliding_window`, `attn:softcap`, `attn:sinks`, ...) or offers them
    (`model:latent`), or the KV layout and decoder that it takes (`kv:state`, `decoder:unmasks`). `refusal` is set
    when the native engine must not run this model, with the reason. `mask_token_id` stands for an unknown token, in
    masked language models.
    """

    source: str
    model_type: str
    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerFacts, ...]
    matrices: tuple[MatrixFacts, ...]
    other_parameters: int = 0
    tied_embeddings: bool = False
    dummy_weights: bool = False
    features: frozenset[str] = frozenset()
    refusal: str | None = None
    digest: str = ""
    notes: tuple[str, ...] = ()
    mask_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def num_parameters(self) -> int:
        return sum(m.parameters for m in self.matrices) + self.other_parameters

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.dtype_bytes


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one machine: bytes/s of a device copy (read + write), FLOP/s of a matmul per dtype.

    On a CPU the bytes/s are those of plain reads where these are faster than a copy.
    """

    copy_bytes_per_s: float | None = None
    matmul_flops_per_s: dict[str, float] = field(default_factory=dict)
    measured_at: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """The device a cell runs on. `memory_bytes` is the device's total (host RAM for `cpu`)."""

    device: str
    name: str
    memory_bytes: int
    num_cores: int
    compute_capability: int | None = None
    dtypes: frozenset[str] = frozenset({"float32", "float16", "bfloat16"})
    ceilings: Ceilings = Ceilings()
    fingerprint: str = ""

    @property
    def provides(self) -> frozenset[str]:
        """Features that the machine itself brings."""
        names = {f"device:{self.device}", *(f"dtype:{dtype}" for dtype in self.dtypes)}
        if self.compute_capability is not None:
            names.add(f"sm:{self.compute_capability}")
        return frozenset(names)
