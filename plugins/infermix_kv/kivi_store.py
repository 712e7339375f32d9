"""The bytes of the KV layout `kivi`: quantized groups in blocks, recent tokens in rows of a full-precision tail."""

from __future__ import annotations

import torch
from infermix.errors import OutOfMemory
from infermix.roles.batch import Batch, GroupBatch
from infermix.roles.kv_grouped import fills_words
from infermix.roles.kv_space import KVGroup, KVShape
from infermix.toolkit.once import once_per_forward
from infermix.toolkit.pool_store import BlockStore
from infermix_kernels.reference.grouped import GroupedPools, write_groups
from torch import Tensor

from infermix_kv.kivi_rule import KiviRule
from infermix_kv.kivi_steps import KiviStep, plan_step
from infermix_kv.kivi_view import KiviView


class KiviStore:
    """New tokens go to the tail; groups that have become old go from there, or straight from a long chunk, to blocks.

    How many groups that will be is not known when a decode step is captured: the most that its query length can
    complete take part for every sequence, and those that are not complete are written to the sink, or, where `fused`
    (on a GPU, groups and heads of whole words), left out by the kernel that does all of it.
    """

    def __init__(
        self, shape: KVShape, device: torch.device | str, dtype: torch.dtype, bits: int, rule: KiviRule
    ) -> None:
        self._shape, self._rule = shape, rule
        widths = (width for group in shape.groups for width in (group.key_dim, group.value_dim))
        self.fused = torch.device(device).type == "cuda" and fills_words(bits, rule.group_size, *widths)
        try:
            self._layers = {
                layer: _allocate(shape, group, device, dtype, bits, rule)
                for group in shape.groups
                for layer in group.layers
            }
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise OutOfMemory(f"no memory for {shape.bytes} bytes of KV on {device}: {error}") from error
        per_block = shape.block_size // rule.group_size
        self._blocks = BlockStore(
            {
                idx: tuple(part.unflatten(0, (-1, per_block)) for part in _quantized(pools))
                for idx, pools in self._layers.items()
            }
        )
        self._rows = BlockStore({idx: (pools.tail_keys, pools.tail_values) for idx, pools in self._layers.items()})

    def write(self, layer_idx: int, k: Tensor, v: Tensor, batch: Batch, group: GroupBatch) -> None:
        step, pools = self._step(layer_idx, batch), self._layers[layer_idx]
        tails = pools.tail_keys.flatten(0, 1), pools.tail_values.flatten(0, 1)
        if step.target is not None and self.fused:
            self._write_fused(pools, step, k, v)
        elif step.target is not None:
            write_groups(step.gather(tails[0], k), step.gather(tails[1], v), pools, step.target)
        for tail, new in zip(tails, (k, v), strict=True):
            tail.index_copy_(0, step.tail_slots, new)

    def _write_fused(self, pools: GroupedPools, step: KiviStep, k: Tensor, v: Tensor) -> None:
        from infermix_kernels.group_write import write_groups

        assert step.target is not None and step.old is not None  # noqa: PT018
        sink = self._shape.sink_block * (self._shape.block_size // self._rule.group_size)
        write_groups(k, v, pools, step.target, step.old, step.fresh, num_groups=sink)

    def view(self, layer_idx: int, batch: Batch, group: GroupBatch) -> KiviView:
        pools, rows = self._layers[layer_idx], batch.tables[1].block_tables[:, 0]
        return KiviView(
            *_quantized(pools),
            pools.tail_keys,
            pools.tail_values,
            batch.tables[0].block_tables,
            rows,
            batch.context_lens,
            self._shape.block_size,
            self._rule.num_recent,
            self._rule,
        )

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        first = self._shape.num_blocks + 1
        self._blocks.copy([pair for pair in pairs if pair[0] < first])
        self._rows.copy([(source - first, target - first) for source, target in pairs if source >= first])

    def block_tensors(self, table: int = 0) -> list[Tensor]:
        """Table 0: quantized groups of every layer, by block; table 1: rows of the tail."""
        return [part for parts in (self._blocks, self._rows)[table].parts.values() for part in parts]

    def allocated_bytes(self) -> int:
        return self._blocks.allocated_bytes() + self._rows.allocated_bytes()

    def _step(self, layer_idx: int, batch: Batch) -> KiviStep:
        return once_per_forward(batch, layer_idx, "kivi", lambda: plan_step(batch, self._shape, self._rule))


def _quantized(pools: GroupedPools) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return pools.keys, pools.values, pools.key_factors, pools.value_factors


def _allocate(
    shape: KVShape, group: KVGroup, device: torch.device | str, dtype: torch.dtype, bits: int, rule: KiviRule
) -> GroupedPools:
    """Of `(num_blocks + 1) * block_size / G` groups and a row of the tail per sequence, the last of each the sink."""
    size, heads = rule.group_size, group.num_kv_heads
    groups = (shape.num_blocks + 1) * shape.block_size // size
    tail = (shape.blocks_of(1) + 1, rule.capacity, heads)

    def zeros(dtype: torch.dtype, *dims: int) -> Tensor:
        return torch.zeros(dims, device=device, dtype=dtype)

    return GroupedPools(
        keys=zeros(torch.uint8, groups, heads, size, group.key_dim * bits // 8),
        values=zeros(torch.uint8, groups, heads, size, group.value_dim * bits // 8),
        key_factors=zeros(torch.float16, groups, heads, group.key_dim, 2),
        value_factors=zeros(torch.float16, groups, heads, size, group.value_dim // size, 2),
        tail_keys=zeros(dtype, *tail, group.key_dim),
        tail_values=zeros(dtype, *tail, group.value_dim),
        block_size=shape.block_size,
        num_recent=rule.num_recent,
    )
