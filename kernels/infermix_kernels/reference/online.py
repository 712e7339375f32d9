"""Attention by online softmax in plain PyTorch: keys in tiles, memory linear in the context instead of quadratic.

What is kept of the keys seen so far is the largest score, the sum of exponentials and the weighted sum of values
(Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax", arXiv 1805.02867; Dao et al., 2022,
"FlashAttention", arXiv 2205.14135). Partial results over disjoint keys can be merged in any order, which is what
split contexts, and keys that lie in several places, rest on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Partial:
    """Of some keys: `peak [n, H]` largest score, `total [n, H]` and `sums [n, H, Dv]` relative to `exp(peak)`.

    Where no key is visible the peak is minus infinity and the rest zero.
    """

    peak: Tensor
    total: Tensor
    sums: Tensor


def nothing_seen(q: Tensor, value_dim: int, sinks: Tensor | None = None) -> Partial:
    """Before the first key. `sinks [H]` are scores without a value; of several partials one may count them."""
    n, heads = q.shape[:2]
    sums = q.new_zeros(n, heads, value_dim)
    if sinks is None:
        return Partial(q.new_full((n, heads), float("-inf")), q.new_zeros(n, heads), sums)
    return Partial(sinks.to(q.dtype).expand(n, heads).clone(), q.new_ones(n, heads), sums)


def merge(first: Partial, second: Partial) -> Partial:
    """Of the keys of both, which must be disjoint."""
    peak = torch.maximum(first.peak, second.peak)
    shares = [_shrunk(part.peak, peak) for part in (first, second)]
    total = first.total * shares[0] + second.total * shares[1]
    return Partial(peak, total, first.sums * shares[0][..., None] + second.sums * shares[1][..., None])


def of_tile(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None = None) -> Partial:
    """`q [n, H, Dk]`, `k [t, Hkv, Dk]`, `v [t, Hkv, Dv]`, `visible [n, t]`; query heads share KV heads in groups."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("nkgd,tkd->nkgt", grouped, k).flatten(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    peak = scores.amax(-1)
    weights = _shrunk(scores, peak[..., None])
    sums = torch.einsum("nkgt,tkd->nkgd", weights.unflatten(1, (k.shape[1], -1)), v).flatten(1, 2)
    return Partial(peak, weights.sum(-1), sums)


def result(part: Partial) -> Tensor:
    """`[n, H, Dv]`; zeros where nothing was visible."""
    return part.sums / torch.where(part.total > 0, part.total, 1)[..., None]


def online_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_bits: Tensor | None = None,
    tile_tokens: int = 256,
) -> Tensor:
    """One sequence: `q [n, H, Dk]` are the last tokens of `k [c, Hkv, Dk]`, `v [c, Hkv, Dv]`; returns `[n, H, Dv]`.

    `tree_bits [n]` says which new tokens each of them sees, in place of causality among them.
    """
    context, first_new = k.shape[0], k.shape[0] - q.shape[0]
    q_pos = torch.arange(first_new, context, device=q.device)[:, None]
    seen = nothing_seen(q, v.shape[-1], sinks)
    for start in range(0, context, tile_tokens):
        position = torch.arange(start, min(start + tile_tokens, context), device=q.device)
        visible = position <= q_pos
        if tree_bits is not None:
            chosen = (tree_bits[:, None] >> (position - first_new).clamp(min=0)) & 1
            visible = torch.where(position < first_new, visible, chosen.bool())
        if window is not None:
            visible = visible & (position > q_pos - window)
        seen = merge(seen, of_tile(q, k[position], v[position], visible, scale, softcap))
    return result(seen)


def _shrunk(scores: Tensor, peak: Tensor) -> Tensor:
    """`exp(scores - peak)`, zero where there is no score at all."""
    return torch.where(scores == float("-inf"), 0, torch.exp(scores - peak))
