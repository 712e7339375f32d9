"""Modules that replace those of a decoder: norms, rotary angles, whole layers that carry the residual unnormed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infermix.errors import Unsupported
from infermix.roles.kv_store import KVPools
from infermix_kernels.rotary import HeadNorms, RotaryTable
from torch import Tensor, nn

from infermix_triton.fused_operators import Activation, Operators


@dataclass(frozen=True, slots=True)
class Stream:
    """What passes between fused layers: `residual + delta`, both `[T, N]`, not yet added."""

    delta: Tensor
    residual: Tensor


@dataclass(frozen=True, slots=True)
class TableRotation:
    """Rotary angles of this forward: rows `positions [T]` of a table. A `Rotation` for the KV write.

    `norms` are applied to every head before it is rotated.
    """

    table: RotaryTable
    positions: Tensor
    operators: Operators
    norms: tuple[FusedNorm, FusedNorm] | None = None

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.norms is not None:
            q, k = (self.operators.norm_heads(x, by) for x, by in zip((q, k), self.norms, strict=True))
        return self.operators.rotate(q, k, self.table, self.positions)

    def write(self, q: Tensor, k: Tensor, v: Tensor, pools: KVPools, slot_mapping: Tensor) -> Tensor:
        norms = None
        if self.norms is not None:
            by_q, by_k = self.norms
            norms = HeadNorms(by_q.weight, by_k.weight, by_q.eps, by_q.offset)
        return self.operators.rotate_and_write(q, k, v, (self.table, self.positions), norms, pools, slot_mapping)

    def after(self, norms: tuple[FusedNorm, FusedNorm] | None) -> TableRotation:
        return self if norms is None else TableRotation(self.table, self.positions, self.operators, norms)


class FusedAngles(nn.Module):
    """Replaces a rotary module: a table made by that module once, so that a forward launches nothing for it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, table: RotaryTable, operators: Operators) -> None:
        super().__init__()
        self.register_buffer("cos", table.cos, persistent=False)
        self.register_buffer("sin", table.sin, persistent=False)
        self.interleaved, self.operators = table.interleaved, operators

    def forward(self, x: Tensor, position_ids: Tensor) -> TableRotation:
        """Raises `Unsupported` for more than one row: packed sequences are one."""
        if position_ids.shape[0] != 1:
            raise Unsupported(f"fused layers take one packed row, not a batch of {position_ids.shape[0]}")
        return TableRotation(RotaryTable(self.cos, self.sin, self.interleaved), position_ids[0], self.operators)


class FusedNorm(nn.Module):
    """RMSNorm by `weight + offset`. What fused layers leave unadded is added on the way."""

    weight: nn.Parameter

    def __init__(self, weight: nn.Parameter, eps: float, offset: float, operators: Operators) -> None:
        super().__init__()
        self.weight, self.eps, self.offset, self.operators = weight, eps, offset, operators

    def forward(self, x: Tensor | Stream) -> Tensor:
        if isinstance(x, Stream):
            return self.operators.add_rms_norm(x.delta, x.residual, self)[0].unsqueeze(0)
        return self.operators.rms_norm(x.reshape(-1, x.shape[-1]), self).view(x.shape)


class FusedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))` with gate and up merged."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, activation: Activation, operators: Operators) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down
        self.activation, self.operators = activation, operators

    def forward(self, x: Tensor) -> Tensor:
        gated = gated_product(self.gate_up_proj, x.reshape(-1, x.shape[-1]), self.activation, self.operators)
        return self.down_proj(gated.view(*x.shape[:-1], -1))


@dataclass(frozen=True)
class Heads:
    """Query and KV heads with their dimensions, and the keywords that the layer hands to attention."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    given: Mapping[str, Any]

    @property
    def bounds(self) -> tuple[int, int]:
        """Columns of a merged q/k/v product where k and v begin."""
        first = self.num_heads * self.key_dim
        return first, first + self.num_kv_heads * self.key_dim


class FusedLayer(nn.Module):
    """A decoder layer of merged linears; takes the embeddings or a `Stream`, returns a `Stream`.

    `attention` is the original attention module without its children: attention functions read its index and its
    settings. `rotary` says whether this layer uses the rotary angles at all.
    """

    def __init__(self, attention: nn.Module, heads: Heads, linears: Mapping[str, nn.Module],
                 norms: Mapping[str, FusedNorm], activation: Activation, operators: Operators) -> None:  # fmt: skip
        """`linears`: qkv, o, gate_up, down; `norms`: attention, mlp and perhaps q, k."""
        super().__init__()
        self.attention, self.heads = attention, heads
        self.qkv_proj, self.o_proj = linears["qkv"], linears["o"]
        self.gate_up_proj, self.down_proj = linears["gate_up"], linears["down"]
        self.attention_norm, self.mlp_norm = norms["attention"], norms["mlp"]
        self.q_norm, self.k_norm = norms.get("q"), norms.get("k")
        self.activation, self.operators = activation, operators
        self.rotary, self._norms = True, _joined(self.q_norm, self.k_norm)
        self._ours: Any = None

    def forward(
        self,
        hidden_states: Tensor | Stream,
        attention_mask: Tensor | None = None,
        position_embeddings: TableRotation | None = None,
        **given: Any,
    ) -> Stream:
        operators = self.operators
        if isinstance(hidden_states, Stream):
            x, residual = operators.add_rms_norm(hidden_states.delta, hidden_states.residual, self.attention_norm)
        else:
            residual = hidden_states.reshape(-1, hidden_states.shape[-1])
            x = operators.rms_norm(residual, self.attention_norm)
        attended = self._attend(x, attention_mask, position_embeddings if self.rotary else None, given)
        x, residual = operators.add_rms_norm(self.o_proj(attended), residual, self.mlp_norm)
        gated = gated_product(self.gate_up_proj, x, self.activation, operators)
        return Stream(self.down_proj(gated), residual)

    def _attend(
        self, x: Tensor, mask: Tensor | None, rotation: TableRotation | None, given: dict[str, Any]
    ) -> Tensor:
        """Our own attention function norms and rotates while it stores keys; any other gets rotated ones."""
        ours = rotation is not None and "infermix" in given
        q, k, v = self._heads(self.qkv_proj(x), normed=not (ours and self._norms))
        if rotation is not None and ours:
            given["rotation"] = rotation.after(self._norms)
        elif rotation is not None:
            q, k = rotation.rotate(q, k)
        function = self._attention_function(given)
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        out, _ = function(self.attention, q, k, v, mask, **{**given, **self.heads.given})
        return out.reshape(x.shape[0], -1)

    def _attention_function(self, given: Mapping[str, Any]) -> Any:
        """The joint's own function, known by its keyword, is looked up once: reading a config costs 20 us."""
        if "infermix" not in given:
            return attention_function(self.attention)
        if self._ours is None:
            self._ours = attention_function(self.attention)
        return self._ours

    def _heads(self, packed: Tensor, *, normed: bool) -> tuple[Tensor, Tensor, Tensor]:
        heads, (first, second) = self.heads, self.heads.bounds
        q = packed[:, :first].unflatten(1, (heads.num_heads, heads.key_dim))
        k = packed[:, first:second].unflatten(1, (heads.num_kv_heads, heads.key_dim))
        v = packed[:, second:].unflatten(1, (heads.num_kv_heads, heads.value_dim))
        if normed and self.q_norm is not None:
            q = self.operators.norm_heads(q, self.q_norm)
        if normed and self.k_norm is not None:
            k = self.operators.norm_heads(k, self.k_norm)
        return q, k, v


def gated_product(gate_up: nn.Module, x: Tensor, kind: Activation, operators: Operators) -> Tensor:
    """`kind(gate(x)) * up(x)` of `x [T, N]`; in one launch where the linear has one for so many rows."""
    if hasattr(type(gate_up), "gated"):
        gated: Tensor | None = gate_up.gated(x, kind)  # type: ignore[operator]
        if gated is not None:
            return gated
    return operators.gate(gate_up(x), kind)


def _joined(q: FusedNorm | None, k: FusedNorm | None) -> tuple[FusedNorm, FusedNorm] | None:
    """Norms of query and key heads that one kernel can apply together."""
    if q is None or k is None or (q.eps, q.offset) != (k.eps, k.offset):
        return None
    return q, k


def attention_function(attention: nn.Module) -> Any:
    """What transformers would call for this module now."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager: Any = getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)
    config: Any = attention.config
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
