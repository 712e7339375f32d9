"""What the attention kernels mean, in plain PyTorch: one sequence after the other, in the dtype of the queries."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor | None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Same arguments and result as `infermix_kernels.attention.paged_attention`; pools are upcast to `q.dtype`.

    `key_scales`, `value_scales` `[num_blocks, Hkv, block_size]`, of dense rows `[B, Hkv, capacity]`.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], values.shape[-1])
    starts, contexts = cu_seqlens_q.tolist(), context_lens.tolist()
    for index, context in enumerate(contexts):
        rows = slice(starts[index], starts[index + 1])
        if context == 0 or rows.start == rows.stop:
            continue
        k = read_sequence(keys, key_scales, block_tables, index, context, q.dtype)
        v = read_sequence(values, value_scales, block_tables, index, context, q.dtype)
        bits = None if tree_mask is None else tree_mask[rows]
        visible = visible_keys(rows.stop - rows.start, context, window, bits, q.device)
        out[rows] = attend(q[rows], k, v, visible, scale, softcap, sinks)
    return out


def read_sequence(
    pool: Tensor, scales: Tensor | None, block_tables: Tensor | None, index: int, context: int, dtype: torch.dtype
) -> Tensor:
    """The `context` tokens of a sequence, `[context, Hkv, D]`, dequantized."""
    if block_tables is None:
        tokens = pool[index]
        factors = None if scales is None else by_token(scales[index])
    else:
        blocks = block_tables[index, : -(-context // pool.shape[1])].long()
        tokens = pool[blocks].flatten(0, 1)
        factors = None if scales is None else by_token(scales[blocks]).flatten(0, 1)
    tokens = tokens[:context].to(dtype)
    return tokens if factors is None else tokens * factors[:context, :, None].to(dtype)


def by_token(scales: Tensor) -> Tensor:
    """`[..., Hkv, block_size]` -> `[..., block_size, Hkv]`, in the order of the numbers themselves."""
    return scales.transpose(-1, -2)


def visible_keys(
    query_len: int, context: int, window: int | None, tree_bits: Tensor | None, device: torch.device
) -> Tensor:
    """`[query_len, context]` bool; the queries are the last tokens of the context."""
    first_new = context - query_len
    position = torch.arange(context, device=device)
    q_pos = torch.arange(first_new, context, device=device)[:, None]
    visible = position <= q_pos
    if tree_bits is not None:
        chosen = (tree_bits[:, None] >> torch.arange(query_len, device=device)) & 1
        visible = torch.cat((visible[:, :first_new], chosen.bool()), dim=1)
    if window is not None:
        visible = visible & (position > q_pos - window)
    return visible


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """`q [n, H, Dk]`, `k [c, Hkv, Dk]`, `v [c, Hkv, Dv]`, `visible [n, c]` -> `[n, H, Dv]`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,chd->hnc", q, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hnc,chd->nhd", weights, v)
