"""What attention means, in fp64 and in as few words as possible: the yardstick of conformance and of self-checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from infermix.roles.attention import LayerSpec


def plain_attention(q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec) -> Tensor:
    """One sequence: `q [n, H, Dk]`, the last n of `keys [c, Hkv, Dk]`, `values [c, Hkv, Dv]` -> `[n, H, Dv]` fp64."""
    query_len, context = q.shape[0], keys.shape[0]
    group = layer.num_heads // layer.num_kv_heads
    k = keys.double().repeat_interleave(group, 1)
    v = values.double().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,chd->hnc", q.double(), k) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    distance = torch.arange(context - query_len, context)[:, None] - torch.arange(context)
    visible = (distance >= (0 if layer.causal else -context)) & (distance < (layer.window or context + 1))
    scores = scores.masked_fill(~visible.to(scores.device), float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.double()[:, None, None].expand(-1, query_len, 1)
        scores = torch.cat((scores, sinks), -1)
    probs = torch.softmax(scores, -1)[..., :context]
    return torch.einsum("hnc,chd->nhd", probs, v)
