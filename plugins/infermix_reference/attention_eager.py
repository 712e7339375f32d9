"""Attention in plain PyTorch: matmul, softmax, matmul, all in fp32. The yardstick for every other backend."""

from __future__ import annotations

import torch
from infermix.roles.attention import LayerSpec
from infermix.roles.batch import Batch
from infermix.roles.kv_store import DenseView, RaggedView, View
from torch import Tensor

from infermix_reference import steps


class EagerAttention:
    """Reads every view (paged ones through a gather); window, softcap, sinks, any head grouping, Dk != Dv."""

    reads: tuple[type, ...] = (RaggedView, DenseView)

    def forward(self, q: Tensor, view: View, batch: Batch, layer: LayerSpec) -> Tensor:
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
        visible = None
        if not steps.all_visible(batch, rows, query_len, layer):
            visible = steps.once_per_forward(
                batch,
                layer,
                ("visible", rows, capacity, layer.window, layer.causal),
                lambda: steps.visible_keys(batch, rows, query_len, capacity, layer.window, causal=layer.causal)[
                    :, None, None
                ],
            )
        folded = steps.fold_heads(q[: rows * query_len], rows, layer.num_kv_heads)
        out = _attend(folded, keys, values, visible, layer)
        out = out.masked_fill(batch.context_lens[:rows, None, None, None] == 0, 0)
        return steps.unfold_heads(out, query_len).to(q.dtype)

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
            pieces.append(_attend_sequence(queries, keys, values, layer, batch, index).to(q.dtype))
        return pieces


def _attend_sequence(q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec, batch: Batch, index: int) -> Tensor:
    """`q [n, H, Dk]` at the end of `keys [c, Hkv, Dk]`, sequence `index` of the batch -> `[n, H, Dv]`."""
    query_len = q.shape[0]
    skipped = steps.first_key(query_len, keys.shape[0], layer.window)
    keys, values = keys[skipped:], values[skipped:]
    visible = None
    if steps.has_tree(batch, index):
        visible = steps.sequence_tree_mask(batch, index, skipped, layer.window)
    elif query_len > 1 and layer.causal:
        visible = steps.sequence_mask(query_len, keys.shape[0], layer.window, q.device)
    folded = steps.fold_heads(q, 1, layer.num_kv_heads)
    return steps.unfold_heads(_attend(folded, keys[None], values[None], visible, layer), query_len)


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, layer: LayerSpec) -> Tensor:
    """`q [B, Hkv, G * n, Dk]`, `keys [B, S, Hkv, Dk]`, `visible` broadcasts to `[B, Hkv, G, n, S]`."""
    scores = torch.matmul(q.float() * layer.scale, keys.float().permute(0, 2, 3, 1))
    num_seqs, num_kv_heads, rows, columns = scores.shape
    scores = scores.view(num_seqs, num_kv_heads, layer.num_heads // num_kv_heads, -1, columns)
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    probs = _softmax(scores, layer).reshape(num_seqs, num_kv_heads, rows, columns)
    return torch.matmul(probs, values.float().transpose(1, 2))


def _softmax(scores: Tensor, layer: LayerSpec) -> Tensor:
    if layer.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = layer.sinks.float().view(1, scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
