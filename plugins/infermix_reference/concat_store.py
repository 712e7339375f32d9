"""The bytes of the KV layout `concat`."""

from __future__ import annotations

import torch
from infermix.roles.batch import Batch, GroupBatch
from infermix.roles.kv_space import KVGroup, KVShape
from infermix.roles.kv_store import RaggedView
from infermix.toolkit.pool_store import host_rows
from torch import Tensor


class ConcatStore:
    """Held tensors are never written again, so a fork shares them."""

    def __init__(self, shape: KVShape, device: torch.device | str, dtype: torch.dtype) -> None:
        self._shape, self._device, self._dtype = shape, device, dtype
        self._held: dict[int, dict[int, tuple[Tensor, Tensor]]] = {
            layer: {} for group in shape.groups for layer in group.layers
        }

    def write(self, layer_idx: int, k: Tensor, v: Tensor, batch: Batch, group: GroupBatch) -> None:
        assert batch.host_context_lens is not None, "kv: concat cannot be captured"
        held, start = self._held[layer_idx], 0
        for row, query_len, context in zip(
            host_rows(batch, group), batch.query_lens, batch.host_context_lens, strict=True
        ):
            new = k[start : start + query_len], v[start : start + query_len]
            start += query_len
            if context:
                held[row] = self._grown(held.get(row), new, context - query_len)

    def _grown(
        self, old: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor], past: int
    ) -> tuple[Tensor, Tensor]:
        if past == 0:
            return new[0].to(self._dtype, copy=True), new[1].to(self._dtype, copy=True)
        assert old is not None
        assert old[0].shape[0] >= past, "tokens are missing"
        return torch.cat((old[0][:past], new[0])), torch.cat((old[1][:past], new[1]))

    def view(self, layer_idx: int, batch: Batch, group: GroupBatch) -> RaggedView:
        held, empty = self._held[layer_idx], self._empty(layer_idx)
        pairs = [held.get(row, empty) for row in host_rows(batch, group)]
        return RaggedView([keys for keys, _ in pairs], [values for _, values in pairs])

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for held in self._held.values():
            for source, target in pairs:
                if source in held:
                    held[target] = held[source]

    def move(self, table: int, sources: list[int], targets: list[int]) -> None:
        size = self._shape.block_size
        by_row: dict[int, list[tuple[int, int]]] = {}
        for source, target in zip(sources, targets, strict=True):
            by_row.setdefault(source // size, []).append((source % size, target % size))
        for held in self._held.values():
            for row, moves in by_row.items():
                held[row] = tuple(_moved(part, moves) for part in held[row])  # type: ignore[assignment]

    def export_blocks(self, blocks: list[int]) -> list[tuple[Tensor, ...]]:
        return [self._export(layer, blocks) for layer in self._held]

    def _export(self, layer_idx: int, blocks: list[int]) -> tuple[Tensor, Tensor]:
        empty = self._empty(layer_idx)
        size = self._shape.block_size
        keys, values = (part.new_zeros(len(blocks), size, *part.shape[1:]) for part in empty)
        for index, block in enumerate(blocks):
            for target, source in zip((keys, values), self._held[layer_idx].get(block, empty), strict=True):
                target[index, : source.shape[0]] = source
        return keys, values

    def import_blocks(self, blocks: list[int], data: list[tuple[Tensor, ...]]) -> None:
        for held, (keys, values) in zip(self._held.values(), data, strict=True):
            for index, block in enumerate(blocks):
                held[block] = keys[index].clone(), values[index].clone()

    def allocated_bytes(self) -> int:
        tensors = {part.data_ptr(): part for held in self._held.values() for pair in held.values() for part in pair}
        return sum(part.numel() * part.element_size() for part in tensors.values())

    def _group(self, layer_idx: int) -> KVGroup:
        return next(group for group in self._shape.groups if layer_idx in group.layers)

    def _empty(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        group = self._group(layer_idx)
        options = {"device": self._device, "dtype": self._dtype}
        return (
            torch.empty(0, group.num_kv_heads, group.key_dim, **options),  # type: ignore[call-overload]
            torch.empty(0, group.num_kv_heads, group.value_dim, **options),  # type: ignore[call-overload]
        )


def _moved(part: Tensor, moves: list[tuple[int, int]]) -> Tensor:
    order = list(range(part.shape[0]))
    for source, target in moves:
        order[target] = source
    return part[order]
