"""Attention through `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from infermix.errors import Unsupported
from infermix.roles.attention import LayerSpec
from infermix.roles.batch import Batch
from infermix.roles.kv_store import DenseView, RaggedView, View
from torch import Tensor

from infermix_reference import steps


class SdpaAttention:
    """Reads every view (paged ones through a gather); window, sinks, any head grouping, Dk != Dv; no softcap."""

    reads: tuple[type, ...] = (RaggedView, DenseView)

    def forward(self, q: Tensor, view: View, batch: Batch, layer: LayerSpec) -> Tensor:
        if layer.softcap is not None:
            raise Unsupported("scaled_dot_product_attention has no softcap; use attention: eager")
        steps.refuse_two_sided_window(layer)
        rows = steps.num_batched_rows(view, batch, on_host=q.device.type == "cpu")
        pieces = [self._batched(q, view, batch, layer, rows)] if rows else []
        if rows < batch.num_seqs:
            pieces += self._one_by_one(q, view, batch, layer, rows)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _batched(self, q: Tensor, view: View, batch: Batch, layer: LayerSpec, rows: int) -> Tensor:
        query_len = batch.query_len or 1
        capacity = steps.capacity_of(batch, rows)
        keys, values = steps.read_batched(view, batch, layer, rows, capacity)
        bias = None
        if not steps.all_visible(batch, rows, query_len, layer):
            bias = self._batched_bias(q, batch, layer, rows, capacity)
        folded = steps.fold_heads(q[: rows * query_len], rows, layer.num_kv_heads)
        out = _attend(folded, keys, values, bias, layer)
        out = out.masked_fill(batch.context_lens[:rows, None, None, None] == 0, 0)
        return steps.unfold_heads(out, query_len)

    def _batched_bias(self, q: Tensor, batch: Batch, layer: LayerSpec, rows: int, capacity: int) -> Tensor:
        query_len, group = batch.query_len or 1, layer.num_heads // layer.num_kv_heads

        def make() -> Tensor:
            visible = steps.visible_keys(batch, rows, query_len, capacity, layer.window, causal=layer.causal)
            return _bias(visible, group, q.dtype).expand(-1, layer.num_kv_heads, -1, -1)

        key = ("bias", rows, capacity, layer.window, layer.causal, layer.num_heads, layer.num_kv_heads, q.dtype)
        return steps.once_per_forward(batch, layer, key, make)

    def _one_by_one(self, q: Tensor, view: View, batch: Batch, layer: LayerSpec, first: int) -> list[Tensor]:
        assert batch.host_context_lens is not None
        pieces, start = [], sum(batch.query_lens[:first])
        for index in range(first, batch.num_seqs):
            query_len, context = batch.query_lens[index], batch.host_context_lens[index]
            queries = q[start : start + query_len]
            start += query_len
            if context == 0:
                pieces.append(q.new_zeros(query_len, layer.num_heads, layer.value_dim))
                continue
            keys, values = view.sequence(index, context)
            skipped = steps.first_key(query_len, context, layer.window)
            keys, values = keys[skipped:], values[skipped:]
            if steps.has_tree(batch, index):
                pieces.append(_attend_tree(queries, keys, values, batch, layer, (index, skipped)))
            else:
                pieces.append(_attend_sequence(queries, keys, values, batch, layer))
        return pieces


def _attend_sequence(q: Tensor, keys: Tensor, values: Tensor, batch: Batch, layer: LayerSpec) -> Tensor:
    """`q [n, H, Dk]` at the end of `keys [c, Hkv, Dk]` -> `[n, H, Dv]`."""
    query_len, context = q.shape[0], keys.shape[0]
    if query_len == context and layer.sinks is None and (layer.window is None or context <= layer.window):
        return _attend_prefill(q, keys, values, layer)
    bias = None
    if query_len > 1 and layer.causal:
        group = layer.num_heads // layer.num_kv_heads
        bias = steps.once_per_forward(
            batch,
            layer,
            ("chunk", query_len, context, layer.window, group, q.dtype),
            lambda: _bias(steps.sequence_mask(query_len, context, layer.window, q.device)[None], group, q.dtype),
        )
    folded = steps.fold_heads(q, 1, layer.num_kv_heads)
    return steps.unfold_heads(_attend(folded, keys[None], values[None], bias, layer), query_len)


def _attend_tree(
    q: Tensor, keys: Tensor, values: Tensor, batch: Batch, layer: LayerSpec, where: tuple[int, int]
) -> Tensor:
    """As `_attend_sequence` for sequence `where[0]` of the batch, whose first key is `where[1]`."""
    group = layer.num_heads // layer.num_kv_heads
    bias = steps.once_per_forward(
        batch,
        layer,
        ("tree", *where, layer.window, group, q.dtype),
        lambda: _bias(steps.sequence_tree_mask(batch, *where, layer.window)[None], group, q.dtype),
    )
    folded = steps.fold_heads(q, 1, layer.num_kv_heads)
    return steps.unfold_heads(_attend(folded, keys[None], values[None], bias, layer), q.shape[0])


def _attend_prefill(q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec) -> Tensor:
    out = F.scaled_dot_product_attention(
        q[None].transpose(1, 2),
        keys[None].transpose(1, 2),
        values[None].transpose(1, 2),
        is_causal=layer.causal and q.shape[0] > 1,
        scale=layer.scale,
        enable_gqa=layer.num_heads != layer.num_kv_heads,
    )
    return out[0].transpose(0, 1)


def _attend(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, layer: LayerSpec) -> Tensor:
    """`q [B, Hkv, G * n, Dk]`, `keys [B, S, Hkv, Dk]`, `bias` broadcasts to `[B, Hkv, G * n, S]`."""
    if layer.sinks is not None:
        bias = _bias_with_sinks(q, keys.shape[1], bias, layer.sinks)
        keys, values = (F.pad(part, (0, 0, 0, 0, 0, 1)) for part in (keys, values))
    return F.scaled_dot_product_attention(
        q, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=bias, scale=layer.scale
    )


def _bias_with_sinks(q: Tensor, num_keys: int, bias: Tensor | None, sinks: Tensor) -> Tensor:
    """A sink is one more key: a zero vector, so that its score is the bias alone, with a value of zeros."""
    num_seqs, num_kv_heads, rows, _ = q.shape
    if bias is None:
        bias = q.new_zeros(1, 1, 1, num_keys)
    by_head = sinks.to(q.dtype).view(num_kv_heads, -1, 1)
    column = by_head.expand(-1, -1, rows // by_head.shape[1]).reshape(1, num_kv_heads, rows, 1)
    parts = (part.expand(num_seqs, num_kv_heads, rows, -1) for part in (bias, column))
    return torch.cat(tuple(parts), dim=-1)


def _bias(visible: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """`visible [B, n, S]` -> `[B, 1, G * n, S]` additive mask.

    The lowest finite number instead of -inf: a row that sees nothing stays free of NaN, and next to any visible key
    it still underflows to a weight of exactly 0.
    """
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    bias = bias.masked_fill(~visible, torch.finfo(dtype).min)
    return bias.repeat(1, group, 1)[:, None]
