"""Pre-allocated block pools, one pair of tensors per layer: the bytes of `dense` and `paged`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from infermix.errors import OutOfMemory
from infermix.roles.batch import Batch, GroupBatch
from infermix.roles.kv_space import KVShape
from infermix.roles.kv_store import DenseView, KVPools, PagedView, View

#: Of blocks that are copied at once.
_MOST_COPIED_BYTES = 1 << 28


def host_rows(batch: Batch, group: GroupBatch) -> tuple[int, ...]:
    """First block of each sequence, on the host; reads the device only when the runner did not say."""
    if batch.host_rows is not None:
        return batch.host_rows
    if "host_rows" not in batch.extra:
        batch.extra["host_rows"] = tuple(group.block_tables[:, 0].tolist())
    return batch.extra["host_rows"]


class BlockStore:
    """Whole-block operations over `parts`: for every layer the tensors `[num_blocks + 1, ...]` that it holds."""

    def __init__(self, parts: dict[int, tuple[Tensor, ...]]) -> None:
        self.parts = parts

    def stacks(self) -> list[Tensor]:
        """What `parts` are slices of, `[layers, num_blocks + 1, ...]`; here each of them by itself.

        A store that lays several layers side by side says so, since every stack costs launches.
        """
        return [part[None] for parts in self.parts.values() for part in parts]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        copy_blocks(self.stacks(), pairs)

    def export_blocks(self, blocks: list[int]) -> list[tuple[Tensor, ...]]:
        return [
            tuple(part.index_select(0, torch.tensor(blocks, device=part.device)) for part in parts)
            for parts in self.parts.values()
        ]

    def import_blocks(self, blocks: list[int], data: list[tuple[Tensor, ...]]) -> None:
        for parts, given in zip(self.parts.values(), data, strict=True):
            for part, new in zip(parts, given, strict=True):
                part[torch.tensor(blocks, device=part.device)] = new.to(part)

    def allocated_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for parts in self.parts.values() for part in parts)


class PoolStore(BlockStore):
    """K `[num_blocks + 1, block_size, Hkv, Dk]` and V alike for every layer; the last block is the sink.

    Layers of a block table with a pool of its own have that many blocks (`KVShape.blocks_of`). In a group with shared
    values, V is a view of the first `Dv` numbers of K, and is neither allocated nor written. The layers of a group
    share one allocation of keys and one of values, so that few copies move a block of all of them.
    """

    def __init__(self, shape: KVShape, device: torch.device | str, dtype: torch.dtype) -> None:
        self.shape = shape
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}
        self._slots: dict[int, tuple[Tensor, ...]] = {}
        #: Per KV group `[layers, blocks, block_size, Hkv, D]`, keys and then values.
        self._stacks: list[list[Tensor]] = []
        for index, group in enumerate(shape.groups):
            slots = shape.blocks_of(shape.table_of(index)) + 1, shape.block_size
            dims = (group.key_dim,) if group.shared_values else (group.key_dim, group.value_dim)
            stacks = [
                self._allocate((len(group.layers), *slots, group.num_kv_heads, dim), device, dtype) for dim in dims
            ]
            self._stacks.append(stacks)
            parts = [stack.unbind() for stack in stacks]
            for layer, own in zip(group.layers, zip(*parts, strict=True), strict=True):
                self._pools[layer] = own[0], own[1] if len(own) > 1 else own[0][..., : group.value_dim]
                self._slots[layer] = tuple(part.flatten(0, 1) for part in own)
        super().__init__({layer: self._pools[layer][: len(slots)] for layer, slots in self._slots.items()})

    def _allocate(self, size: tuple[int, ...], device: torch.device | str, dtype: torch.dtype) -> Tensor:
        try:
            return torch.zeros(size, device=device, dtype=dtype)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise OutOfMemory(f"no memory for {self.shape.bytes} bytes of KV on {device}: {error}") from error

    def write(self, layer_idx: int, k: Tensor, v: Tensor, batch: Batch, group: GroupBatch) -> None:
        for pool, new in zip(self._slots[layer_idx], (k, v), strict=False):
            pool.index_copy_(0, group.slot_mapping, new)

    def stacks(self) -> list[Tensor]:
        return [stack for stacks in self._stacks for stack in stacks]

    def move(self, table: int, sources: list[int], targets: list[int]) -> None:
        for stack in self._stacks_of(table):
            rows = stack.flatten(1, 2)
            read, write = _indices(sources, targets, device=stack.device)
            rows.index_copy_(1, write, rows.index_select(1, read))

    def _stacks_of(self, table: int) -> Iterator[Tensor]:
        """Of layers whose KV group uses block table `table`."""
        for index, stacks in enumerate(self._stacks):
            if self.shape.table_of(index) == table:
                yield from stacks

    def pools(self, layer_idx: int) -> KVPools:
        return KVPools(*self._pools[layer_idx])

    def view(self, layer_idx: int, batch: Batch, group: GroupBatch) -> View:
        raise NotImplementedError

    def block_tensors(self, table: int = 0) -> list[Tensor]:
        """Every tensor of the layers whose KV group uses block table `table`; equal parts of all layers together."""
        found: list[Tensor] = []
        for index, group in enumerate(self.shape.groups):
            if self.shape.table_of(index) == table:
                for alike in zip(*(self.parts[layer] for layer in group.layers), strict=True):
                    found += alike
        return found


def copy_blocks(stacks: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (source, target) of `stacks [layers, blocks, ...]`, all layers of a stack at once.

    All sources are read before a target is written, so what is read has to fit: of many blocks, few layers at a time.
    """
    if not pairs or not stacks:
        return
    read, write = _indices(*zip(*pairs, strict=True), device=stacks[0].device)
    for stack in stacks:
        per_layer = max(1, prod(stack.shape[2:]) * stack.element_size() * len(pairs))
        at_once = max(1, _MOST_COPIED_BYTES // per_layer)
        for layers in stack.split(at_once) if at_once < len(stack) else (stack,):
            layers.index_copy_(1, write, layers.index_select(1, read))


def _indices(sources: Sequence[int], targets: Sequence[int], *, device: torch.device) -> Tensor:
    """int64 `[2, n]` on the device, in one copy that nobody waits for."""
    host = torch.empty(2, len(sources), dtype=torch.int64, pin_memory=device.type == "cuda")
    host.numpy()[:] = sources, targets
    return host.to(device, non_blocking=True)


class PagedStore(PoolStore):
    """Read through block tables."""

    def view(self, layer_idx: int, batch: Batch, group: GroupBatch) -> PagedView:
        keys, values = self._pools[layer_idx]
        return PagedView(keys, values, group.block_tables)


@dataclass(slots=True)
class RowsView(PagedView):
    """Dense rows in any order, as a paged view with one block per sequence; `sequence` does not copy."""

    rows: tuple[int, ...]

    def sequence(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        row = self.rows[index]
        return self.keys[row, :length], self.values[row, :length]


class DenseStore(PoolStore):
    """One block per sequence.

    Where sequence i of the batch has row i (always so in a captured step: the runner keeps it, with padded rows as
    holes), the view is a slice of the pool; other batches get a `RowsView`.
    """

    def view(self, layer_idx: int, batch: Batch, group: GroupBatch) -> DenseView | RowsView:
        keys, values = self._pools[layer_idx]
        if not batch.captured:
            rows = host_rows(batch, group)
            if any(row != index for index, row in enumerate(rows)):
                return RowsView(keys, values, group.block_tables, rows)
        return DenseView(keys[: batch.num_seqs], values[: batch.num_seqs])
