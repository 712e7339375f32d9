"""Attention of new tokens over a paged or dense KV cache: the one entry to the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from infermix_kernels.attention_call import Call, Rules, Workspace, shares_values
from infermix_kernels.attention_checks import check_arguments, check_table_contents
from infermix_kernels.attention_prepare import prepare
from infermix_kernels.attention_repeat import Repeat, remembered, signature_of
from infermix_kernels.launch import Launch, LaunchTable

__all__ = ["Workspace", "pack_tree_mask", "paged_attention"]


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor | None,
    scale: float,
    max_query_len: int,
    max_context_len: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    launches: LaunchTable | None = None,
    launch: Launch | None = None,
    check_block_tables: bool = False,
) -> Tensor:
    """`q [T, H, Dk]` -> `[T, H, Dv]`: prefill, chunks, decode and verification, in any mix of query lengths.

    - `keys [num_blocks, block_size, Hkv, Dk]`, `values [..., Dv]` with `block_tables [B, W]` int32, or dense rows
      `[B, capacity, Hkv, D]` with `block_tables=None`. bf16, fp16, fp32; or int8 / float8_e4m3fn with
      `key_scales`, `value_scales` `[num_blocks, Hkv, block_size]` (fp32 or fp16; dense: `[B, Hkv, capacity]`), one
      factor per token and head: a stored number times its factor is the value. A head's factors lie side by side in
      a block, because each would cost a memory sector of 32 bytes if the heads did.
    - `values` may be the first numbers of `keys`, a view of the same memory (latent attention): rows are then read
      once, and may be as wide as 512 + 128 numbers.
    - `cu_seqlens_q [B + 1]`, `context_lens [B]` int32. The queries of a sequence are the last tokens of its context.
      `cu_seqlens_q` may start above 0: only the rows that it covers are computed. Context 0 gives rows of zeros.
    - `max_query_len`, `max_context_len`: bounds known on the host. The launch depends on them and on shapes alone, so
      the call can be captured. Memory that no context covers is never used, whatever it holds.
    - `window` counts the query's own token. `sinks [H]` are extra logits. `tree_mask [T]` int64 replaces the causal
      rule among the new tokens of a sequence (at most 64): bit j of a token says that it sees new token j; see
      `pack_tree_mask`. Not together with `window`.
    - `workspace` is needed for capture only; `launches` holds measured launch parameters, `launch` overrides them.

    Raises `ValueError` before anything is launched when shapes, dtypes or strides do not fit; with
    `check_block_tables` (reads the device) also when an id or a context length points outside.
    """
    tensors = {
        "q": q,
        "keys": keys,
        "values": values,
        "key_scales": key_scales,
        "value_scales": value_scales,
        "out": out,
        "cu_seqlens": cu_seqlens_q,
        "context_lens": context_lens,
        "tables": block_tables,
        "sinks": sinks,
        "tree_mask": tree_mask,
    }
    if check_block_tables:
        check_table_contents((keys.shape[0], keys.shape[1]), cu_seqlens_q, context_lens, block_tables)
    bounds, shared = (max_query_len, max_context_len), shares_values(keys, values)
    known: list[Repeat] | None = None
    if q.is_cuda and workspace is not None and out is not None:
        known = remembered(signature_of(tensors, shared, bounds, scale, window, softcap, workspace, launches, launch))
        if known:
            known[0].run(tensors)
            return out
    check_arguments(tensors, *bounds, window, shared=shared)
    if out is None:
        out = tensors["out"] = q.new_empty(q.shape[0], q.shape[1], values.shape[3])
    if q.shape[0] and context_lens.shape[0]:
        scales = key_scales, value_scales
        call = Call(q, keys, values, out, cu_seqlens_q, context_lens, block_tables, sinks, scales, shared)
        prepared = prepare(call, Rules(scale, window, softcap, tree_mask), bounds, workspace, launches, launch)
        if known is None:
            prepared.run()
        else:
            known.append(Repeat(prepared, tensors))
    return out


def pack_tree_mask(mask: Tensor) -> Tensor:
    """`[T, n]` bool, n <= 64, to the `[T]` int64 of `paged_attention`: bit j of row t is `mask[t, j]`."""
    weights = torch.ones(mask.shape[1], dtype=torch.int64, device=mask.device)
    weights = weights << torch.arange(mask.shape[1], device=mask.device)
    return (mask.to(torch.int64) * weights).sum(dim=1)
