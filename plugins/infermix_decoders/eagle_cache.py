"""Keys and values of the draft layer: a row per lane, long enough for a text and what is guessed behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from infermix.roles.request import Sequence
from torch import Tensor


class EagleCache:
    """`keys`, `values` `[max_num_seqs, capacity, Hkv, D]`. What pads a batch lies behind what a row has seen.

    What lies at index i of a row need not be of position i: after a prefix hit the layer has not seen the beginning.
    Behind the last row there are `spare` more places, which may be written to as if they were the next row's: what
    pads a batch of fixed size goes there.
    """

    def __init__(
        self, max_num_seqs: int, capacity: int, num_kv_heads: int, head_dim: int, like: Tensor, *, spare: int = 0
    ) -> None:
        places, size = max_num_seqs * capacity, (num_kv_heads, head_dim)
        self.max_num_seqs = max_num_seqs
        #: Keys and values `[max_num_seqs * capacity + spare, Hkv, D]`, all rows in one.
        self.pools = like.new_zeros(places + spare, *size), like.new_zeros(places + spare, *size)
        self.keys, self.values = (pool[:places].view(max_num_seqs, capacity, *size) for pool in self.pools)
        self._counts: dict[int, int] = {}

    @property
    def capacity(self) -> int:
        """Places of a row."""
        return self.keys.shape[1]

    @property
    def bytes(self) -> int:
        return sum(pool.numel() * pool.element_size() for pool in self.pools)

    def counts(self, sequences: Iterable[Sequence]) -> list[int]:
        """Pairs of feature and token that the layer has seen of each text."""
        known = self._counts
        return [known.get(sequence.seq_id, 0) for sequence in sequences]

    def grow(self, sequence: Sequence, count: int) -> int:
        """Of a text the layer is shown so many more pairs; how many it has seen before."""
        before = self._counts.get(sequence.seq_id, 0)
        self._counts[sequence.seq_id] = before + count
        return before

    def forget(self, sequence: Sequence) -> None:
        self._counts.pop(sequence.seq_id, None)

    def slots(self, lanes: Tensor, places: Tensor) -> Tensor:
        """`[B, n]`: where `places [B, n]` of rows `lanes [B]` lie when all rows are one."""
        return lanes[:, None] * self.keys.shape[1] + places

    def copies(self, lanes: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, reach, Hkv, D]` of the first places of rows `lanes [B]`."""
        return self.keys[:, :reach].index_select(0, lanes), self.values[:, :reach].index_select(0, lanes)

    def attention(self, lanes: Tensor, slots: Tensor, visible: Tensor) -> Attention:
        return Attention(self, lanes, slots, visible)


class Attention:
    """One call of the layer: new keys go to `slots [B, n]` of rows `lanes [B]`, queries see `visible [B, n, C]`.

    Columns of `visible` are the first C places of a row.
    """

    def __init__(self, cache: EagleCache, lanes: Tensor, slots: Tensor, visible: Tensor) -> None:
        self._cache, self._lanes, self._slots, self._visible = cache, lanes, slots.flatten(), visible

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [B, n, H, D]`, `k`, `v [B, n, Hkv, D]` -> `[B, n, H, D]`."""
        cache = self._cache
        for pool, new in zip(cache.pools, (k, v), strict=True):
            pool.index_copy_(0, self._slots, new.flatten(0, 1).to(pool.dtype))
        keys, values = cache.copies(self._lanes, self._visible.shape[2])
        return masked_attention(q, keys, values, self._visible)


def masked_attention(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """`q [B, n, H, D]` over the `visible [B, n, C]` of `keys`, `values [B, C, Hkv, D]` -> `[B, n, H, D]`.

    Query heads that share a KV head stand in line as if they were tokens: told of groups, PyTorch repeats the keys
    and values for every head when there is a mask.
    """
    heads, num_new = keys.shape[2], q.shape[1]
    groups = q.shape[2] // heads
    lined = q.unflatten(2, (heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    with _without_cudnn():
        out = F.scaled_dot_product_attention(
            lined, keys.transpose(1, 2).to(q.dtype), values.transpose(1, 2).to(q.dtype),
            attn_mask=visible.repeat(1, groups, 1)[:, None],
        )  # fmt: skip
    return out.unflatten(2, (groups, num_new)).permute(0, 3, 1, 2, 4).flatten(2, 3)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """cuDNN's attention, which PyTorch prefers on some GPUs, makes a plan on the host for every new shape, and the
    shapes of what the layer is shown change with every step. `sdpa_kernel` would take several times as long.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def causal_places(past: Tensor, num_new: int, reach: int) -> tuple[Tensor, Tensor]:
    """Places `[B, n]` behind `past [B]`, and what each sees of the first `reach` places `[B, n, reach]`."""
    places = past[:, None] + torch.arange(num_new, device=past.device)
    return places, torch.arange(reach, device=past.device) <= places[:, :, None]
