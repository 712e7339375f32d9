"""What attention computes once per forward and shares between layers: masks, gather indices, folded heads."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from infermix.errors import Unsupported
from infermix.roles.attention import LayerSpec
from infermix.roles.batch import MAX_TREE_TOKENS, Batch
from infermix.roles.kv_store import DenseView, PagedView, View
from infermix.toolkit import once
from torch import Tensor

T = TypeVar("T")

#: Longest uniform query that an eager step handles in one batched call; longer ones are prefill.
MAX_BATCHED_QUERY = 16
#: Most that a batched call on a host may read, as a multiple of what the sequences hold.
MAX_HOST_PADDING = 1.5


def once_per_forward(batch: Batch, layer: LayerSpec, key: Hashable, make: Callable[[], T]) -> T:
    """`toolkit.once.once_per_forward` for an attention layer."""
    return once.once_per_forward(batch, layer.layer_idx, key, make)


def refuse_two_sided_window(layer: LayerSpec) -> None:
    """Raises `Unsupported` for a window of a layer that sees in both directions."""
    if not layer.causal and layer.window is not None:
        raise Unsupported(f"layer {layer.layer_idx} has a sliding window in both directions")


def fold_heads(q: Tensor, num_seqs: int, num_kv_heads: int) -> Tensor:
    """`q [B * n, H, D]` -> `[B, Hkv, G * n, D]`: heads that share K become query rows of it, no repeat."""
    tokens, heads, dim = q.shape
    query_len = tokens // num_seqs
    if query_len == 1:
        return q.view(num_seqs, num_kv_heads, heads // num_kv_heads, dim)
    split = q.view(num_seqs, query_len, num_kv_heads, heads // num_kv_heads, dim)
    return split.permute(0, 2, 3, 1, 4).reshape(num_seqs, num_kv_heads, -1, dim)


def unfold_heads(out: Tensor, query_len: int) -> Tensor:
    """The inverse of `fold_heads`: `[B, Hkv, G * n, D]` -> `[B * n, H, D]`."""
    num_seqs, num_kv_heads, rows, dim = out.shape
    if query_len == 1:
        return out.reshape(num_seqs, num_kv_heads * rows, dim)
    split = out.view(num_seqs, num_kv_heads, rows // query_len, query_len, dim)
    return split.permute(0, 3, 1, 2, 4).reshape(num_seqs * query_len, -1, dim)


def num_batched_rows(view: View, batch: Batch, on_host: bool) -> int:
    """How many leading sequences are read in one batched call; all of them in a captured step.

    A batched call reads every sequence up to the longest context. On a host that costs time, so it is made only for
    similar contexts; on a device, one launch for all always pays. Decodes come first, so a prefix is enough.
    """
    if batch.host_context_lens is None:
        return batch.num_seqs
    if not hasattr(view, "batched"):
        return 0
    longest = MAX_BATCHED_QUERY if batch.tree_mask is None else MAX_TREE_TOKENS
    if batch.query_len is not None and batch.query_len <= longest:
        rows = batch.num_seqs
    else:
        rows = next((i for i, n in enumerate(batch.query_lens) if n != 1), batch.num_seqs)
    contexts = batch.host_context_lens[:rows]
    if on_host and rows and rows * max(contexts) > MAX_HOST_PADDING * sum(contexts):
        return 0
    return rows


def capacity_of(batch: Batch, rows: int) -> int:
    """Number of key positions that a batched call over the first `rows` sequences reads."""
    if batch.host_context_lens is None:
        return batch.context_capacity
    return max(batch.host_context_lens[:rows])


def visible_keys(
    batch: Batch, rows: int, query_len: int, capacity: int, window: int | None, *, causal: bool = True
) -> Tensor:
    """`[rows, query_len, capacity]` bool on the device: causal or in the tree, in the window, inside the context.

    Not `causal`: everything inside the context.
    """
    if batch.tree_mask is not None and query_len <= MAX_TREE_TOKENS:
        new = slice(0, rows * query_len)
        shape = (rows, query_len)
        return _tree_visible(batch.tree_mask[new].view(shape), batch.positions[new].view(shape),
                             batch.context_lens[:rows], capacity, window)  # fmt: skip
    device = batch.context_lens.device
    context = batch.context_lens[:rows].to(torch.int64)
    keys = torch.arange(capacity, device=device)
    if not causal:
        return (keys < context[:, None]).unsqueeze(1).expand(-1, query_len, -1)
    offsets = torch.arange(query_len, device=device) - query_len
    positions = (context[:, None] + offsets)[:, :, None]
    visible = keys <= positions
    if window is not None:
        visible = visible & (keys > positions - window)
    return visible


def sequence_mask(query_len: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """`[query_len, keys]` bool for one sequence whose last query sits at the last key."""
    positions = torch.arange(keys - query_len, keys, device=device)[:, None]
    columns = torch.arange(keys, device=device)
    visible = columns <= positions
    if window is not None:
        visible = visible & (columns > positions - window)
    return visible


def has_tree(batch: Batch, index: int) -> bool:
    """Whether new tokens of a sequence see what the tree mask says, not all that is before them."""
    return batch.tree_mask is not None and 1 < batch.query_lens[index] <= MAX_TREE_TOKENS


def sequence_tree_mask(batch: Batch, index: int, first_key: int, window: int | None) -> Tensor:
    """`[query_len, context - first_key]` bool for one sequence of a batch with a tree mask; lengths on the host."""
    assert batch.tree_mask is not None
    assert batch.host_context_lens is not None
    start, query_len = sum(batch.query_lens[:index]), batch.query_lens[index]
    new = slice(start, start + query_len)
    context = batch.host_context_lens[index]
    lengths = batch.context_lens[index : index + 1]
    visible = _tree_visible(batch.tree_mask[None, new], batch.positions[None, new], lengths, context, window)
    return visible[0, :, first_key:]


def _tree_visible(bits: Tensor, positions: Tensor, contexts: Tensor, capacity: int, window: int | None) -> Tensor:
    """`[B, n, capacity]` bool; `bits`, `positions [B, n]` of the new tokens, which are the last of `contexts [B]`."""
    query_len = bits.shape[1]
    first_new = contexts.to(torch.int64)[:, None] - query_len
    place = torch.arange(capacity, device=bits.device) - first_new  # among the new tokens; negative: cached before
    inside = place.clamp(0, query_len - 1)
    chosen = (bits[:, :, None] >> inside[:, None, :]) & 1
    visible = (place < 0)[:, None] | ((chosen != 0) & ((place >= 0) & (place < query_len))[:, None])
    if window is not None:
        depths = positions - positions[:, :1]
        behind = torch.where(place < 0, place, depths.gather(1, inside))
        visible = visible & (behind[:, None, :] > depths[:, :, None] - window)
    return visible


def first_key(query_len: int, context: int, window: int | None) -> int:
    """The first key that any of the last `query_len` tokens sees."""
    return 0 if window is None else max(0, context - query_len - window + 1)


def all_visible(batch: Batch, rows: int, query_len: int, layer: LayerSpec) -> bool:
    """Whether the host knows that no mask is needed: equal contexts, window not reached, one query each if causal."""
    if batch.host_context_lens is None or (layer.causal and query_len != 1):
        return False
    window = layer.window
    longest = max(batch.host_context_lens[:rows])
    return min(batch.host_context_lens[:rows]) == longest and (window is None or longest <= window)


def read_batched(view: View, batch: Batch, layer: LayerSpec, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
    """K `[rows, capacity, Hkv, Dk]` and V alike, without anything that the sequences did not write.

    Beyond a context, memory may hold anything, NaN included, and 0 times NaN is NaN: the gather repeats the
    sequence's last token there. It is made for dense views as well, for that reason, and because one streaming copy
    costs a CPU less than a matmul over cold strided rows. Views that compute what they give back (quantized ones) do
    it themselves, and get zeros there. Rows without context are unspecified.
    """
    if not isinstance(view, DenseView | PagedView):
        return _within_context(view, batch, layer, rows, capacity)
    slots = once_per_forward(
        batch, layer, ("slots", layer.group, rows, capacity), lambda: _slots(view, batch, rows, capacity)
    )
    keys = _take(view.keys, slots, rows)
    if view.values.data_ptr() == view.keys.data_ptr():  # a latent view: the values lie inside the keys
        return keys, keys[..., : view.values.shape[-1]]
    return keys, _take(view.values, slots, rows)


def _within_context(view: Any, batch: Batch, layer: LayerSpec, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
    def beyond() -> Tensor:
        positions = torch.arange(capacity, device=batch.context_lens.device)
        return (positions >= batch.context_lens[:rows, None])[:, :, None, None]

    mask = once_per_forward(batch, layer, ("beyond", rows, capacity), beyond)
    keys, values = view.batched(capacity, rows)
    return keys.masked_fill(mask, 0), values.masked_fill(mask, 0)


def _slots(view: DenseView | PagedView, batch: Batch, rows: int, capacity: int) -> Tensor:
    block_size = view.keys.shape[1]
    last = (batch.context_lens[:rows].to(torch.int64) - 1).clamp_(min=0)[:, None]
    positions = torch.minimum(torch.arange(capacity, device=last.device), last)
    if isinstance(view, DenseView):
        return (torch.arange(rows, device=last.device)[:, None] * block_size + positions).view(-1)
    blocks = view.block_tables[:rows].to(torch.int64).gather(1, positions // block_size)
    return (blocks * block_size + positions % block_size).view(-1)


def _take(pool: Tensor, slots: Tensor, rows: int) -> Tensor:
    return pool.flatten(0, 1).index_select(0, slots).view(rows, -1, *pool.shape[2:])
