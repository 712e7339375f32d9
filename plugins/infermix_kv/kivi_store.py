"""The bytes of the KV layout `kivi`: quantized groups in blocks, recent tokens in rows of a full-precision tail."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from infermix.errors import OutOfMemory
from infermix.roles.batch import Batch, GroupBatch
from infermix.roles.kv_space import KVGroup, KVShape
from infermix.toolkit.once import once_per_forward
from infermix.toolkit.pool_store import BlockStore
from infermix_kernels.reference.grouped import pack
from torch import Tensor

from infermix_kv.kivi_pack import quantize
from infermix_kv.kivi_rule import KiviRule
from infermix_kv.kivi_steps import KiviStep, plan_step
from infermix_kv.kivi_view import KiviView


@dataclass(frozen=True, slots=True)
class KiviLayer:
    """One layer: what `GroupedView` describes, of `(num_blocks + 1) * block_size / G` groups of G tokens.

    The rows of the tail follow each other, `tail_keys`, `tail_values` `[(rows + 1) * capacity, Hkv, D]`, the last one
    the sink.
    """

    keys: Tensor
    values: Tensor
    key_factors: Tensor
    value_factors: Tensor
    tail_keys: Tensor
    tail_values: Tensor
    bits: int

    @property
    def quantized(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.keys, self.values, self.key_factors, self.value_factors

    def flush(self, k: Tensor, v: Tensor, target: Tensor) -> None:
        """Quantize whole groups `k [n, G, Hkv, Dk]`, `v [n, G, Hkv, Dv]` into the groups `target [n]`."""
        numbers, *factors = quantize(k.transpose(1, 2), self.bits, dim=2)
        self.keys.index_copy_(0, target, pack(numbers, self.bits))
        self.key_factors.index_copy_(0, target, torch.stack(factors, dim=-1).squeeze(2))
        grouped = v.transpose(1, 2).unflatten(-1, (self.value_factors.shape[3], -1))
        numbers, *factors = quantize(grouped, self.bits, dim=-1)
        self.values.index_copy_(0, target, pack(numbers.flatten(-2), self.bits))
        self.value_factors.index_copy_(0, target, torch.cat(factors, dim=-1))


class KiviStore:
    """New tokens go to the tail; groups that have become old go from there, or straight from a long chunk, to blocks.

    How many groups that will be is not known when a decode step is captured: the most that its query length can
    complete are computed for every sequence, and those that are not complete are written to the sink.
    """

    def __init__(
        self, shape: KVShape, device: torch.device | str, dtype: torch.dtype, bits: int, rule: KiviRule
    ) -> None:
        self._shape, self._rule = shape, rule
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
                idx: tuple(part.unflatten(0, (-1, per_block)) for part in layer.quantized)
                for idx, layer in self._layers.items()
            }
        )
        self._rows = BlockStore(
            {
                idx: tuple(part.unflatten(0, (-1, rule.capacity)) for part in (layer.tail_keys, layer.tail_values))
                for idx, layer in self._layers.items()
            }
        )

    def write(self, layer_idx: int, k: Tensor, v: Tensor, batch: Batch, group: GroupBatch) -> None:
        step, layer = self._step(layer_idx, batch), self._layers[layer_idx]
        if step.target is not None:
            layer.flush(step.gather(layer.tail_keys, k), step.gather(layer.tail_values, v), step.target)
        layer.tail_keys.index_copy_(0, step.tail_slots, k)
        layer.tail_values.index_copy_(0, step.tail_slots, v)

    def view(self, layer_idx: int, batch: Batch, group: GroupBatch) -> KiviView:
        layer, ring = self._layers[layer_idx], (-1, self._rule.capacity)
        tails = layer.tail_keys.unflatten(0, ring), layer.tail_values.unflatten(0, ring)
        rows = batch.tables[1].block_tables[:, 0]
        return KiviView(
            *layer.quantized,
            *tails,
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


def _allocate(
    shape: KVShape, group: KVGroup, device: torch.device | str, dtype: torch.dtype, bits: int, rule: KiviRule
) -> KiviLayer:
    size, heads = rule.group_size, group.num_kv_heads
    groups = (shape.num_blocks + 1) * shape.block_size // size
    slots = (shape.blocks_of(1) + 1) * rule.capacity

    def zeros(dtype: torch.dtype, *dims: int) -> Tensor:
        return torch.zeros(dims, device=device, dtype=dtype)

    return KiviLayer(
        keys=zeros(torch.uint8, groups, heads, size, group.key_dim * bits // 8),
        values=zeros(torch.uint8, groups, heads, size, group.value_dim * bits // 8),
        key_factors=zeros(torch.float16, groups, heads, group.key_dim, 2),
        value_factors=zeros(torch.float16, groups, heads, size, group.value_dim // size, 2),
        tail_keys=zeros(dtype, slots, heads, group.key_dim),
        tail_values=zeros(dtype, slots, heads, group.value_dim),
        bits=bits,
    )
