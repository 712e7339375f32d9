"""Second half of the proof at load: the attention part and the KV store alone, on random input.

Logits pass through the whole model, whose rounding in 16 bits hides small mistakes of attention. Here q, k and v are
exact in the dtype of the cell, so little but the rounding of the output separates the part from its meaning in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from infermix.engine.packing import PackEntry, pack
from infermix.engine.walk import CHUNK, Piece, chunk_of, reserve, steps
from infermix.errors import WrongResult
from infermix.roles.kv_space import KVBudget
from infermix.toolkit.plain_attention import plain_attention

if TYPE_CHECKING:
    from torch import Tensor

    from infermix.engine.bridge import Joint
    from infermix.roles.attention import AttentionBackend, LayerSpec
    from infermix.roles.batch import Batch
    from infermix.roles.kv_space import KVGroup, KVLayout, KVShape, KVSpace
    from infermix.roles.kv_store import KVStore

#: Rows of a sequence that are compared: its last ones.
_KEPT_ROWS = 32
_FLOAT32_EPS = 64


@dataclass(frozen=True)
class _Drawn:
    """Input of one layer: per sequence `q [L, H, Dk]`, `k [L, Hkv, Dk]`, `v [L, Hkv, Dv]`."""

    layer: LayerSpec
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]


def check_attention_part(
    joint: Joint,
    attention: AttentionBackend,
    layout: KVLayout,
    lengths: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare `attention`, through the store of `layout`, with its plain meaning; returns the figures for the record.

    One layer of each distinct kind takes part; sequences of `lengths` join, are chunked, decode and finish. The error
    is that of the worst row. Raises `WrongResult` beyond what rounding explains.
    """
    chosen = distinct_layers(joint.layers)
    groups = _only(joint.groups, {layer.layer_idx for layer in chosen})
    generator = torch.Generator().manual_seed(seed)
    drawn = [_draw(layer, lengths, generator, device, dtype) for layer in chosen]
    seen = _walk(drawn, groups, attention, layout, lengths, device, dtype)
    limit, worst = attention_tolerance(dtype), 0.0
    for each, rows in zip(drawn, seen, strict=True):
        error = max(map(_worst_row, rows, _expected(each)))
        if not error <= limit:
            raise WrongResult(
                f"self-check failed: {type(attention).__name__} over {type(layout).__name__} differs from plain "
                f"attention by {error:.2e} (relative, worst row of layer {each.layer.layer_idx}, "
                f"{str(dtype).removeprefix('torch.')}; rounding explains {limit:.1e})"
            )
        worst = max(worst, error)
    return {"relative_error": worst, "tolerance": limit, "layers": len(chosen)}


def attention_tolerance(dtype: torch.dtype) -> float:
    """The relative error of a row that rounding explains.

    16-bit dtypes: one eps. Rounding the output costs 0.3 eps, and rounding the weights of the keys, as fused kernels
    do, as much again. fp32: 64 eps, for the sums of products inside scores and output.
    """
    return torch.finfo(dtype).eps * (_FLOAT32_EPS if dtype.itemsize >= 4 else 1)


def distinct_layers(layers: Mapping[int, LayerSpec]) -> list[LayerSpec]:
    """The first layer of every kind: group, shape, scale, window, softcap, with or without sinks."""
    kinds: dict[tuple[Any, ...], LayerSpec] = {}
    for _, layer in sorted(layers.items()):
        shape = (layer.group, layer.num_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim)
        kinds.setdefault((*shape, layer.scale, layer.window, layer.softcap, layer.sinks is None), layer)
    return list(kinds.values())


def _only(groups: Sequence[KVGroup], layers: set[int]) -> tuple[KVGroup, ...]:
    """The same groups with nothing but `layers`, so that the store is small."""
    return tuple(replace(group, layers=tuple(idx for idx in group.layers if idx in layers)) for group in groups)


def _draw(
    layer: LayerSpec, lengths: Sequence[int], generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> _Drawn:
    """Normal numbers; q is sized so that scores have a deviation of 1, whatever the scale of the layer."""

    def normal(heads: int, dim: int, size: float = 1.0) -> list[Tensor]:
        drawn = (torch.randn(length, heads, dim, generator=generator) * size for length in lengths)
        return [each.to(device, dtype) for each in drawn]

    size = 1 / (layer.scale * math.sqrt(layer.key_dim))
    return _Drawn(
        layer,
        normal(layer.num_heads, layer.key_dim, size),
        normal(layer.num_kv_heads, layer.key_dim),
        normal(layer.num_kv_heads, layer.value_dim),
    )


def _walk(
    drawn: Sequence[_Drawn],
    groups: tuple[KVGroup, ...],
    attention: AttentionBackend,
    layout: KVLayout,
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> list[list[Tensor]]:
    """Per layer and sequence what attention returned, `[L, H, Dv]`."""
    budget = KVBudget(len(lengths), max(lengths), dtype.itemsize, max_query_len=CHUNK, keep_all=True)
    shape = layout.shape(groups, budget)
    space, store = layout.space(shape), layout.store(shape, device, dtype)
    parts: list[list[list[Tensor]]] = [[[] for _ in lengths] for _ in drawn]
    for pieces in steps(lengths, chunk_of(shape)):
        ordered = reserve(space, pieces)
        spans = [slice(0 if space.recompute else p.start, p.start + p.num_new) for p in ordered]
        batch = _pack(ordered, spans, space, shape, device)
        for each, collected in zip(drawn, parts, strict=True):
            rows = _attend(each, ordered, spans, batch, attention, store)
            for piece, part in zip(ordered, rows, strict=True):
                collected[piece.sequence].append(part[-piece.num_new :])
        for piece in ordered:
            if piece.start + piece.num_new == lengths[piece.sequence]:
                space.release(piece.sequence)
    return [[torch.cat(rows) for rows in collected] for collected in parts]


def _pack(
    pieces: Sequence[Piece], spans: Sequence[slice], space: KVSpace, shape: KVShape, device: torch.device
) -> Batch:
    entries = [
        PackEntry(piece.sequence, [0] * (span.stop - span.start), span.start)
        for piece, span in zip(pieces, spans, strict=True)
    ]
    return pack(entries, space, shape, device)


def _attend(
    drawn: _Drawn,
    pieces: Sequence[Piece],
    spans: Sequence[slice],
    batch: Batch,
    attention: AttentionBackend,
    store: KVStore,
) -> Sequence[Tensor]:
    """One step of one layer, as the joint does it; the output of each piece."""
    layer, group = drawn.layer, batch.groups[drawn.layer.group]
    q, k, v = (
        torch.cat([part[piece.sequence][span] for piece, span in zip(pieces, spans, strict=True)])
        for part in (drawn.q, drawn.k, drawn.v)
    )
    store.write(layer.layer_idx, k, v, batch, group)
    return attention.forward(q, store.view(layer.layer_idx, batch, group), batch, layer).split(batch.query_lens)


def _expected(drawn: _Drawn) -> list[Tensor]:
    return [
        plain_attention(q[-_KEPT_ROWS:], k, v, drawn.layer) for q, k, v in zip(drawn.q, drawn.k, drawn.v, strict=True)
    ]


def _worst_row(seen: Tensor, expected: Tensor) -> float:
    """Largest norm of a row's difference over the norm of the row; the last rows of `seen` are those expected."""
    difference = (seen[-len(expected) :].double() - expected).flatten(1).norm(dim=1)
    return float((difference / expected.flatten(1).norm(dim=1)).nan_to_num(math.inf).max())
