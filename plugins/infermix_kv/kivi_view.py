"""The KV layout `kivi` as attention reads it: in place, or gathered in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from infermix.roles.kv_grouped import GroupedView
from infermix_kernels.reference.grouped import GroupedPools, read_sequence
from torch import Tensor

from infermix_kv.kivi_rule import KiviRule


@dataclass(slots=True)
class KiviView(GroupedView):
    """Both ways of gathering copy: the declared adapter `gather`."""

    rule: KiviRule
    gathers = True

    def sequence(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        rows = self.tail_rows[index : index + 1].to(torch.int64)
        tails = (part.index_select(0, rows) for part in (self.tail_keys, self.tail_values))
        return read_sequence(self._pools(*tails), self.block_tables[index], 0, length, self.tail_keys.dtype)

    def batched(self, capacity: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
        tables = self.block_tables[:rows]
        per_seq = -(-capacity // self.rule.group_size)
        groups = self._groups(tables, per_seq).flatten()
        keys, values = self._pools(self.tail_keys, self.tail_values).read(groups, self.tail_keys.dtype)
        places, slots = self._recent(per_seq * self.rule.group_size, rows)
        keys.index_copy_(0, places, self.tail_keys.flatten(0, 1).index_select(0, slots))
        values.index_copy_(0, places, self.tail_values.flatten(0, 1).index_select(0, slots))
        return (
            keys.unflatten(0, (tables.shape[0], -1))[:, :capacity],
            values.unflatten(0, (tables.shape[0], -1))[:, :capacity],
        )

    def _pools(self, tail_keys: Tensor, tail_values: Tensor) -> GroupedPools:
        return GroupedPools(
            self.keys, self.values, self.key_factors, self.value_factors, tail_keys, tail_values, self.block_size,
            self.num_recent,
        )  # fmt: skip

    def _groups(self, tables: Tensor, count: int) -> Tensor:
        """`[..., count]` the first groups of sequences with block tables `[..., W]`."""
        per_block = self.block_size // self.rule.group_size
        number = torch.arange(count, device=tables.device)
        return tables[..., number // per_block].to(torch.int64) * per_block + number % per_block

    def _recent(self, width: int, rows: int | None) -> tuple[Tensor, Tensor]:
        """Where recent tokens go in rows of `width` tokens, and where they come from, `[B * max_tail]` each.

        A sequence with fewer of them repeats its last one, which is always recent.
        """
        contexts = self.context_lens[:rows].to(torch.int64)[:, None]
        offsets = torch.arange(self.rule.max_tail, device=contexts.device)
        positions = torch.minimum(self.rule.flushed(contexts) + offsets, (contexts - 1).clamp(min=0))
        sequences = torch.arange(contexts.shape[0], device=contexts.device)[:, None]
        slots = self.tail_rows[:rows].to(torch.int64)[:, None] * self.rule.capacity + positions % self.rule.capacity
        return (sequences * width + positions).flatten(), slots.flatten()
