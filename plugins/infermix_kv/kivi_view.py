"""What attention reads of the KV layout `kivi`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infermix_kv.kivi_rule import KiviRule

if TYPE_CHECKING:
    from infermix_kv.kivi_store import KiviLayer


@dataclass(slots=True)
class KiviView:
    """Old tokens from their quantized groups, recent ones from the tail. `rows [B]`: the row of each sequence's tail.

    Both ways of reading it copy: the declared adapter `gather`.
    """

    layer: KiviLayer
    block_tables: Tensor
    rows: Tensor
    context_lens: Tensor
    block_size: int
    rule: KiviRule
    gathers = True

    def sequence(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        flushed = self.rule.num_flushed(length)
        groups = self._groups(self.block_tables[index], flushed // self.rule.group_size)
        recent = torch.arange(flushed, length, device=self.rows.device) % self.rule.capacity
        slots = self.rows[index].to(torch.int64) * self.rule.capacity + recent
        keys, values = self.layer.read(groups)
        return (
            torch.cat((keys, self.layer.tail_keys.index_select(0, slots))),
            torch.cat((values, self.layer.tail_values.index_select(0, slots))),
        )

    def batched(self, capacity: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
        tables = self.block_tables[:rows]
        per_seq = -(-capacity // self.rule.group_size)
        keys, values = self.layer.read(self._groups(tables, per_seq).flatten())
        places, slots = self._recent(per_seq * self.rule.group_size, rows)
        keys.index_copy_(0, places, self.layer.tail_keys.index_select(0, slots))
        values.index_copy_(0, places, self.layer.tail_values.index_select(0, slots))
        return (
            keys.unflatten(0, (tables.shape[0], -1))[:, :capacity],
            values.unflatten(0, (tables.shape[0], -1))[:, :capacity],
        )

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
        slots = self.rows[:rows].to(torch.int64)[:, None] * self.rule.capacity + positions % self.rule.capacity
        return (sequences * width + positions).flatten(), slots.flatten()
