"""Role: KV layout, second half. The bytes, and the views that attention reads.

Every view answers `sequence` (host lengths known) and `batched` (captured or uniform steps). `gathers` says whether
those copy: reading a paged layout through them is the declared adapter `gather`, never a hidden cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from infermix.roles.batch import Batch, GroupBatch


@dataclass(slots=True)
class RaggedView:
    """One `[S_i, Hkv, D]` tensor per sequence."""

    keys: list[Tensor]
    values: list[Tensor]
    gathers = False

    def sequence(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        """K `[length, Hkv, Dk]` and V `[length, Hkv, Dv]` of one sequence."""
        return self.keys[index][:length], self.values[index][:length]


@dataclass(slots=True)
class DenseView:
    """`keys [B, capacity, Hkv, Dk]`: row i belongs to sequence i of the batch; no copy was made."""

    keys: Tensor
    values: Tensor
    gathers = False

    def sequence(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        return self.keys[index, :length], self.values[index, :length]

    def batched(self, capacity: int) -> tuple[Tensor, Tensor]:
        """K `[B, capacity, Hkv, Dk]` and V alike; what lies beyond a sequence's context is unspecified."""
        return self.keys[:, :capacity], self.values[:, :capacity]


@dataclass(slots=True)
class PagedView:
    """`keys [num_blocks + 1, block_size, Hkv, Dk]`, `block_tables [B, W]` int32."""

    keys: Tensor
    values: Tensor
    block_tables: Tensor
    gathers = True

    def sequence(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        blocks = self.block_tables[index, : -(-length // self.keys.shape[1])]
        return self._gather(self.keys, blocks)[:length], self._gather(self.values, blocks)[:length]

    def batched(self, capacity: int) -> tuple[Tensor, Tensor]:
        num_seqs = self.block_tables.shape[0]
        blocks = self.block_tables[:, : -(-capacity // self.keys.shape[1])].reshape(-1)
        keys, values = self._gather(self.keys, blocks), self._gather(self.values, blocks)
        return (
            keys.view(num_seqs, -1, *keys.shape[1:])[:, :capacity],
            values.view(num_seqs, -1, *values.shape[1:])[:, :capacity],
        )

    @staticmethod
    def _gather(pool: Tensor, blocks: Tensor) -> Tensor:
        return pool.index_select(0, blocks).flatten(0, 1)


@dataclass(slots=True)
class QuantizedPagedView:
    """A paged view of int8 or float8_e4m3fn numbers: a stored number times the scale of its token and head.

    `key_scales`, `value_scales` `[num_blocks + 1, Hkv, block_size]` fp32: the scales of a head lie side by side.
    `dtype` is what the gather returns.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor
    block_tables: Tensor
    dtype: torch.dtype
    gathers = True

    def sequence(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        blocks = self.block_tables[index, : -(-length // self.keys.shape[1])]
        keys, values = self._gather(self.keys, self.key_scales, blocks), self._values(blocks)
        return keys[:length], values[:length]

    def batched(self, capacity: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """As `AdaptedView.batched`."""
        tables = self.block_tables[:rows, : -(-capacity // self.keys.shape[1])]
        blocks = tables.reshape(-1)
        keys, values = self._gather(self.keys, self.key_scales, blocks), self._values(blocks)
        return (
            keys.view(tables.shape[0], -1, *keys.shape[1:])[:, :capacity],
            values.view(tables.shape[0], -1, *values.shape[1:])[:, :capacity],
        )

    def _values(self, blocks: Tensor) -> Tensor:
        return self._gather(self.values, self.value_scales, blocks)

    def _gather(self, pool: Tensor, scales: Tensor, blocks: Tensor) -> Tensor:
        """`[n * block_size, Hkv, D]`. Moved as bytes: not every device can index fp8."""
        numbers = _as_bytes(pool).index_select(0, blocks).view(pool.dtype).float()
        factors = scales.index_select(0, blocks).transpose(1, 2).unsqueeze(-1)
        return (numbers * factors).to(self.dtype).flatten(0, 1)


def _as_bytes(pool: Tensor) -> Tensor:
    import torch

    return pool.view(torch.uint8)


class AdaptedView(Protocol):
    """A view that only its own layout knows; every backend reads it through the declared adapter `gather`."""

    @property
    def gathers(self) -> bool: ...

    def sequence(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        """K `[length, Hkv, Dk]` and V alike of one sequence, whose context is `length`."""
        ...

    def batched(self, capacity: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """K `[rows, capacity, Hkv, Dk]` and V alike of the first `rows` sequences (`None`: all of them).

        None of their contexts exceeds `capacity`; what lies beyond a context is unspecified.
        """
        ...


View = RaggedView | DenseView | PagedView | QuantizedPagedView | AdaptedView


@dataclass(frozen=True, slots=True)
class KVPools:
    """`keys`, `values` `[num_blocks + 1, block_size, Hkv, D]`.

    Pools of int8 or float8_e4m3fn come with `key_scales`, `value_scales` `[num_blocks + 1, Hkv, block_size]` fp32,
    contiguous: a stored number times the scale of its token and head is the value. The order differs from the pools'
    because one head reads its scales alone, and lone numbers would cost a memory sector of 32 bytes each.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


class Rotation(Protocol):
    """A position embedding that a layer leaves to the moment when keys are stored. Both methods may work in place."""

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """`q [T, H, D]`, `k [T, Hkv, D]`, rotated to the positions of the batch."""
        ...

    def write(self, q: Tensor, k: Tensor, v: Tensor, pools: KVPools, slot_mapping: Tensor) -> Tensor:
        """Store rotated `k` and `v [T, Hkv, Dv]` in their slots and return rotated `q`, in one go."""
        ...


class KVStore(Protocol):
    """Device memory of a layout. `write` and `view` are capturable unless the layout declares `graph:no`.

    A store whose `write` does nothing but put each row at its slot may have a method `pools(layer_idx) -> KVPools`:
    whoever wants to do more on the way (rotate, quantize) then writes there itself instead of calling `write`.

    A store of a layout that provides `kv:swap` has `block_tensors(table) -> list[Tensor]`: every tensor that blocks
    of that table address, contiguous, indexed by block in dimension 0. Copying row i of all of them copies block i.

    A store with `forgets = True` holds K and V of one layer at a time: a layer that shares those of another writes
    them again, under the other's index.

    A store of a layout that provides `kv:move` has `move(table, sources, targets)`: copy what slots `sources` hold in
    every layer whose group uses block table `table` to slots `targets` (lists of slot numbers); all sources are read
    before anything is written.

    Optional methods of a store that drops tokens by their attention scores:

    - `observe(layer: LayerSpec, q, batch, group)`, called in every layer after `write` and before attention with the
      rotated queries `q [T, H, Dk]`: the store computes what it wants to know from them and its own keys.
    - `evict(evictions: list[Eviction])`, called between forwards: drop tokens in every layer and move the others.
    """

    def write(self, layer_idx: int, k: Tensor, v: Tensor, batch: Batch, group: GroupBatch) -> None:
        """Store `k [T, Hkv, Dk]`, `v [T, Hkv, Dv]` at `group.slot_mapping`."""
        ...

    def view(self, layer_idx: int, batch: Batch, group: GroupBatch) -> View: ...

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in every layer."""
        ...

    def export_blocks(self, blocks: list[int]) -> list[tuple[Tensor, ...]]:
        """Blocks of every layer, as copies on the device: `[n, block_size, Hkv, D]` keys, values (unless these
        are part of the keys), and whatever else of a block the layout keeps beside them (scales); `n` comes first."""
        ...

    def import_blocks(self, blocks: list[int], data: list[tuple[Tensor, ...]]) -> None: ...

    def allocated_bytes(self) -> int:
        """Bytes of every tensor that the store holds."""
        ...
