"""The bytes of the KV layout `quantized`."""

from __future__ import annotations

import torch
from infermix.errors import OutOfMemory
from infermix.roles.batch import Batch, GroupBatch
from infermix.roles.kv_space import KVShape
from infermix.roles.kv_store import KVPools, QuantizedPagedView
from infermix.toolkit.once import once_per_forward
from infermix.toolkit.pool_store import PoolStore
from infermix_kernels.reference.ops import quantize_rows
from torch import Tensor


class QuantizedStore(PoolStore):
    """Pools of `stored` numbers; scales `[num_blocks + 1, Hkv, block_size]` fp32 of keys and of values.

    Pools are moved as bytes, since not every device can index fp8.
    """

    def __init__(self, shape: KVShape, device: torch.device | str, dtype: torch.dtype, stored: torch.dtype) -> None:
        super().__init__(shape, device, stored)
        self._dtype, self._stored = dtype, stored
        self._scales: dict[int, tuple[Tensor, Tensor]] = {}
        self._scale_stacks: list[list[Tensor]] = []
        self._stacks = [[stack.view(torch.uint8) for stack in stacks] for stacks in self._stacks]
        for group in shape.groups:
            size = (len(group.layers), shape.num_blocks + 1, group.num_kv_heads, shape.block_size)
            stacks = [_zeros(size, device), _zeros(size, device)]
            self._scale_stacks.append(stacks)
            for layer, pair in zip(group.layers, zip(*stacks, strict=True), strict=True):
                self._scales[layer] = pair
                keys, values = (pool.view(torch.uint8) for pool in self._pools[layer])
                self._slots[layer] = keys.flatten(0, 1), values.flatten(0, 1)
                self.parts[layer] = (keys, values, *self._scales[layer])

    def write(self, layer_idx: int, k: Tensor, v: Tensor, batch: Batch, group: GroupBatch) -> None:
        slots, size = group.slot_mapping, self.shape.block_size
        place = once_per_forward(batch, layer_idx, ("quantized", id(group)), lambda: (slots // size, slots % size))
        for new, pool, scales in zip((k, v), self._slots[layer_idx], self._scales[layer_idx], strict=True):
            numbers, factors = quantize_rows(new, self._stored)
            pool.index_copy_(0, slots, numbers.view(torch.uint8))
            scales.transpose(1, 2).index_put_(place, factors)

    def stacks(self) -> list[Tensor]:
        return [*super().stacks(), *(stack for stacks in self._scale_stacks for stack in stacks)]

    def move(self, table: int, sources: list[int], targets: list[int]) -> None:
        super().move(table, sources, targets)
        for index, stacks in enumerate(self._scale_stacks):
            if self.shape.table_of(index) == table:
                for stack in stacks:
                    read, write = torch.tensor([sources, targets]).to(stack.device, non_blocking=True)
                    size = self.shape.block_size
                    stack[:, write // size, :, write % size] = stack[:, read // size, :, read % size]

    def pools(self, layer_idx: int) -> KVPools:
        return KVPools(*self._pools[layer_idx], *self._scales[layer_idx])

    def view(self, layer_idx: int, batch: Batch, group: GroupBatch) -> QuantizedPagedView:
        return QuantizedPagedView(*self._pools[layer_idx], *self._scales[layer_idx], group.block_tables, self._dtype)


def _zeros(size: tuple[int, ...], device: torch.device | str) -> Tensor:
    try:
        return torch.zeros(size, device=device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise OutOfMemory(f"no memory for KV scales {size} on {device}: {error}") from error
