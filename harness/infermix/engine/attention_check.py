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


class Readback:
    """What a lossy layout gives back at every step: attention over it, and how far it is from what was written."""

    def __init__(self, drawn: Sequence[_Drawn]) -> None:
        self._rows: dict[int, dict[int, list[Tensor]]] = {each.layer.layer_idx: {} for each in drawn}
        self._off = self._size = 0.0

    def note(self, drawn: _Drawn, pieces: Sequence[Piece], view: Any) -> None:
        for index, piece in enumerate(pieces):
            stop = piece.start + piece.num_new
            read = view.sequence(index, stop)
            for seen, written in zip(read, (drawn.k[piece.sequence], drawn.v[piece.sequence]), strict=True):
                self._off += float((seen.double() - written[:stop].double()).square().sum())
                self._size += float(written[:stop].double().square().sum())
            rows = plain_attention(drawn.q[piece.sequence][piece.start : stop], read[0], read[1], drawn.layer)
            self._rows[drawn.layer.layer_idx].setdefault(piece.sequence, []).append(rows)

    def expected(self) -> list[list[Tensor]]:
        """Per layer and sequence the last rows of attention over what was read."""
        return [
            [torch.cat(rows[sequence])[-_KEPT_ROWS:] for sequence in sorted(rows)] for rows in self._rows.values()
        ]

    def judge(self, layout: KVLayout, stated: float) -> dict[str, float]:
        """Root mean square of what was lost over that of what was written; `WrongResult` beyond `stated`."""
        error = math.sqrt(self._off / self._size)
        if not error <= stated:
            raise WrongResult(
                f"self-check failed: {type(layout).__name__} gives back keys and values that are off by {error:.2e} "
                f"(root mean square over that of normal numbers; it states {stated:.1e})"
            )
        return {"kv_error": error, "kv_error_stated": stated}


def check_attention_part(
    joint: Joint,
    attention: AttentionBackend,
    layout: KVLayout,
    lengths: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    kv_error: float | None = None,
) -> dict[str, Any]:
    """Compare `attention`, through the store of `layout`, with its plain meaning; returns the figures for the record.

    One layer of each distinct kind takes part; sequences of `lengths` join, are chunked, decode and finish (layers
    that are not causal take them whole). The error
    is that of the worst row. With `kv_error`, what a lossy layout states of itself, attention is compared with its
    meaning over what the layout gives back, and that with what was written. Raises `WrongResult` beyond what rounding
    explains, or the layout states.
    """
    chosen = distinct_layers(joint.layers)
    groups = _only(joint.groups, {layer.layer_idx for layer in chosen})
    if kv_error is not None:
        lengths = (*lengths, *_beyond_the_tail(layout, groups, max(lengths), dtype))
    generator = torch.Generator().manual_seed(seed)
    drawn = [_draw(layer, joint.groups[layer.group], lengths, generator, device, dtype) for layer in chosen]
    readback = None if kv_error is None else Readback(drawn)
    seen = _walk(drawn, groups, attention, layout, lengths, device, dtype, readback)
    limit, worst = attention_tolerance(dtype) * (1 if readback is None else _readback_factor(dtype)), 0.0
    expected = [_expected(each) for each in drawn] if readback is None else readback.expected()
    for each, rows, right in zip(drawn, seen, expected, strict=True):
        error = max(map(_worst_row, rows, right))
        if not error <= limit:
            raise WrongResult(
                f"self-check failed: {type(attention).__name__} over {type(layout).__name__} differs from plain "
                f"attention by {error:.2e} (relative, worst row of layer {each.layer.layer_idx}, "
                f"{str(dtype).removeprefix('torch.')}; rounding explains {limit:.1e})"
            )
        worst = max(worst, error)
    figures = {"relative_error": worst, "tolerance": limit, "layers": len(chosen)}
    return figures if readback is None or kv_error is None else {**figures, **readback.judge(layout, kv_error)}


def attention_tolerance(dtype: torch.dtype) -> float:
    """The relative error of a row that rounding explains.

    16-bit dtypes: one eps. Rounding the output costs 0.3 eps, and rounding the weights of the keys, as fused kernels
    do, as much again. fp32: 64 eps, for the sums of products inside scores and output.
    """
    return torch.finfo(dtype).eps * (_FLOAT32_EPS if dtype.itemsize >= 4 else 1)


def _readback_factor(dtype: torch.dtype) -> int:
    """What a lossy layout gives back is rounded to the dtype once more than what a kernel reads of it.

    In fp32 it also shows that kernels add up stored numbers, some with an offset, before they scale them.
    """
    return 8 if dtype.itemsize >= 4 else 2


def distinct_layers(layers: Mapping[int, LayerSpec]) -> list[LayerSpec]:
    """The first layer of every kind: group, shape, scale, window, softcap, with or without sinks."""
    kinds: dict[tuple[Any, ...], LayerSpec] = {}
    for _, layer in sorted(layers.items()):
        shape = (layer.group, layer.num_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim)
        kinds.setdefault((*shape, layer.scale, layer.window, layer.softcap, layer.sinks is None, layer.causal), layer)
    return list(kinds.values())


def _only(groups: Sequence[KVGroup], layers: set[int]) -> tuple[KVGroup, ...]:
    """The same groups with nothing but `layers`, so that the store is small."""
    return tuple(replace(group, layers=tuple(idx for idx in group.layers if idx in layers)) for group in groups)


def _beyond_the_tail(
    layout: KVLayout, groups: tuple[KVGroup, ...], max_len: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """The length of a sequence that outgrows whatever the layout keeps of each sequence apart from its tokens."""
    shape = layout.shape(groups, KVBudget(1, max_len, dtype.itemsize))
    each = sum(group.bytes_per_token(dtype.itemsize) for group in groups)
    apart = math.ceil(shape.bytes_per_seq / each)
    return (2 * apart + _KEPT_ROWS,) if apart else ()


def _draw(
    layer: LayerSpec,
    group: KVGroup,
    lengths: Sequence[int],
    generator: torch.Generator,
    device: torch.device,
    dtype: torch.dtype,
) -> _Drawn:
    """Normal numbers; q is sized so that scores have a deviation of 1, whatever the scale of the layer."""

    def normal(heads: int, dim: int, size: float = 1.0) -> list[Tensor]:
        drawn = (torch.randn(length, heads, dim, generator=generator) * size for length in lengths)
        return [each.to(device, dtype) for each in drawn]

    size = 1 / (layer.scale * math.sqrt(layer.key_dim))
    q, k = normal(layer.num_heads, layer.key_dim, size), normal(layer.num_kv_heads, layer.key_dim)
    if group.shared_values:
        return _Drawn(layer, q, k, [each[..., : layer.value_dim] for each in k])
    return _Drawn(layer, q, k, normal(layer.num_kv_heads, layer.value_dim))


def _walk(
    drawn: Sequence[_Drawn],
    groups: tuple[KVGroup, ...],
    attention: AttentionBackend,
    layout: KVLayout,
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    readback: Readback | None = None,
) -> list[list[Tensor]]:
    """Per layer and sequence what attention returned, `[L, H, Dv]`; `readback` sees every view that it read."""
    budget = KVBudget(len(lengths), max(lengths), dtype.itemsize, max_query_len=CHUNK, keep_all=True)
    shape = layout.shape(groups, budget)
    space, store = layout.space(shape), layout.store(shape, device, dtype)
    parts: list[list[list[Tensor]]] = [[[] for _ in lengths] for _ in drawn]
    for pieces in steps(lengths, chunk_of(shape), causal=all(each.layer.causal for each in drawn)):
        ordered = reserve(space, pieces)
        spans = [slice(0 if space.recompute else p.start, p.start + p.num_new) for p in ordered]
        batch = _pack(ordered, spans, space, shape, device)
        for each, collected in zip(drawn, parts, strict=True):
            rows = _attend(each, ordered, spans, batch, attention, store)
            if readback is not None:
                readback.note(each, ordered, store.view(each.layer.layer_idx, batch, batch.groups[each.layer.group]))
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
