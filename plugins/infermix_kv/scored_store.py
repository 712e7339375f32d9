"""The bytes of the evicting KV layouts: paged pools with an attention score per slot and KV head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from infermix.roles.attention import LayerSpec
from infermix.roles.batch import Batch, GroupBatch
from infermix.roles.kv_space import Eviction, KVShape
from infermix.toolkit.pool_store import PagedStore
from torch import Tensor

from infermix_kv.eviction import Policy

#: Queries whose weights are held at once: a whole prompt would take its length squared.
_ROWS = 128


class ScoredStore(PagedStore):
    """Scores are sums of attention weights over queries and over the query heads that share a KV head, in fp32.

    Memory is constant; `observe` and `evict` read lengths on the host and run outside captured steps.
    """

    def __init__(self, shape: KVShape, device: torch.device | str, dtype: torch.dtype, policy: Policy) -> None:
        super().__init__(shape, device, dtype)
        self._policy = policy
        self._scores: dict[int, Tensor] = {}
        self._score_stacks: list[Tensor] = []
        for group in shape.groups:
            size = (len(group.layers), shape.num_blocks + 1, shape.block_size, group.num_kv_heads)
            self._score_stacks.append(self._allocate(size, device, torch.float32))
            for layer, scores in zip(group.layers, self._score_stacks[-1].unbind(), strict=True):
                self._scores[layer] = scores.flatten(0, 1)
                self.parts[layer] = (*self.parts[layer], scores)

    def stacks(self) -> list[Tensor]:
        return [*super().stacks(), *self._score_stacks]

    def observe(self, layer: LayerSpec, q: Tensor, batch: Batch, group: GroupBatch) -> None:
        """Take or add up the weights that the new queries `[T, H, Dk]` give to everything in the cache."""
        if batch.host_context_lens is None or not any(map(self._policy.observes, batch.query_lens)):
            return
        owner = layer.layer_idx if layer.kv_from is None else layer.kv_from
        start = 0
        for index, (query_len, context) in enumerate(zip(batch.query_lens, batch.host_context_lens, strict=True)):
            if context and self._policy.observes(query_len):
                slots = self._cache_slots(group.block_tables[index], context)
                self._take(owner, layer, q[start : start + query_len], slots)
            start += query_len

    def _take(self, owner: int, layer: LayerSpec, q: Tensor, slots: Tensor) -> None:
        keys, scores = self._slots[owner][0].index_select(0, slots), self._scores[owner]
        observed = self._policy.observed_queries
        if observed is not None:
            scores[slots] = weights_of(q[-observed:], keys, layer).T
            return
        if layer.kv_from is None:
            scores[slots[-q.shape[0] :]] = 0
        scores[slots] += weights_of(q, keys, layer).T

    def _cache_slots(self, blocks: Tensor, num_tokens: int) -> Tensor:
        tokens, size = torch.arange(num_tokens, device=blocks.device), self.shape.block_size
        return blocks.long()[tokens // size] * size + tokens % size

    def evict(self, evictions: list[Eviction]) -> None:
        for eviction in evictions:
            device = next(iter(self._scores.values())).device
            slots = self._cache_slots(torch.tensor(eviction.blocks, device=device), eviction.num_cached)
            for layer in self._scores:
                self._compact(layer, slots, eviction)

    def _compact(self, layer: int, slots: Tensor, eviction: Eviction) -> None:
        """Every head keeps its own tokens; they stay in order and move to the first slots."""
        scores = self._scores[layer].index_select(0, slots)
        kept = chosen_tokens(scores, eviction.num_kept, eviction.num_recent, self._policy.pool_kernel)
        target = slots[: eviction.num_kept]
        for pool in self._slots[layer]:
            held = pool.index_select(0, slots)
            pool[target] = held.gather(0, kept[:, :, None].expand(-1, -1, held.shape[2]))
        self._scores[layer][target] = scores.gather(0, kept)


def weights_of(q: Tensor, keys: Tensor, layer: LayerSpec) -> Tensor:
    """Attention weights of `q [n, H, Dk]`, the last n of `keys [c, Hkv, Dk]`, summed over queries: `[Hkv, c]`."""
    total = torch.zeros(keys.shape[1], keys.shape[0], device=q.device)
    columns = torch.arange(keys.shape[0], device=q.device)
    k = keys.float().permute(1, 2, 0)[:, None]
    for first in range(0, q.shape[0], _ROWS):
        rows = q[first : first + _ROWS]
        n = rows.shape[0]
        position = torch.arange(n, device=q.device) + (keys.shape[0] - q.shape[0] + first)
        hidden = columns > position[:, None]
        if layer.window is not None:
            hidden = hidden | (columns <= position[:, None] - layer.window)
        folded = rows.float().view(n, keys.shape[1], -1, rows.shape[2]).permute(1, 2, 0, 3)
        scores = torch.matmul(folded * layer.scale, k)
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        total += _softmax(scores.masked_fill(hidden, float("-inf")), layer).sum((1, 2))
    return total


def _softmax(scores: Tensor, layer: LayerSpec) -> Tensor:
    """Over the last dimension of `[Hkv, G, n, c]`; a layer's sinks take their share of the weight."""
    if layer.sinks is None:
        return torch.softmax(scores, -1)
    sinks = layer.sinks.float().view(scores.shape[0], -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]


def chosen_tokens(scores: Tensor, num_kept: int, num_recent: int, pool_kernel: int) -> Tensor:
    """Tokens that stay, `[num_kept, Hkv]` in ascending order: the last `num_recent` and those of the highest scores.

    `scores [c, Hkv]`. Equal scores keep the earlier token, so that the choice does not depend on the device.
    """
    older = scores[: scores.shape[0] - num_recent].T
    if pool_kernel > 1:
        older = F.max_pool1d(older[:, None], pool_kernel, stride=1, padding=pool_kernel // 2)[:, 0]
    best = older.sort(dim=1, descending=True, stable=True).indices[:, : num_kept - num_recent]
    recent = torch.arange(scores.shape[0] - num_recent, scores.shape[0], device=scores.device)
    return torch.cat((best.sort(dim=1).values, recent.expand(scores.shape[1], -1)), 1).T
