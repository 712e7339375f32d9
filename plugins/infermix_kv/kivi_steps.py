"""What a forward does to the KV layout `kivi`, computed once and shared by its layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from infermix.roles.batch import Batch
from infermix.roles.kv_space import KVShape
from torch import Tensor

from infermix_kv.kivi_rule import KiviRule


@dataclass(frozen=True, slots=True)
class KiviStep:
    """`tail_slots [T]`: where each new token goes. `target [n]`: the groups that are written (`None`: none).

    Token t of group i is row `fresh[i, t]` of the new tokens where that is not negative, else slot `old[i, t]` of the
    tail as it was; `fresh` is `None` where no new token is old enough.
    """

    tail_slots: Tensor
    target: Tensor | None = None
    old: Tensor | None = None
    fresh: Tensor | None = None

    def gather(self, tail: Tensor, new: Tensor) -> Tensor:
        """`[n, G, Hkv, D]` out of the tail `[slots, Hkv, D]` and the new tokens `[T, Hkv, D]`."""
        assert self.old is not None
        kept = tail.index_select(0, self.old.flatten())
        if self.fresh is not None:
            index = self.fresh.flatten()
            arrived = new.index_select(0, index.clamp(min=0))
            kept = torch.where((index < 0)[:, None, None], kept, arrived)
        return kept.unflatten(0, self.old.shape)


def plan_step(batch: Batch, shape: KVShape, rule: KiviRule) -> KiviStep:
    """On the device alone when the step is captured; else the host counts the groups."""
    owner = _owners(batch)
    contexts = batch.context_lens.to(torch.int64)
    starts = batch.cu_seqlens_q.to(torch.int64)
    before = contexts - starts.diff()
    rows = batch.tables[1].block_tables[:, 0].to(torch.int64)
    index = torch.arange(batch.num_tokens, device=owner.device) + (before - starts[:-1])[owner]
    # Of a chunk longer than the tail only the end stays there; a padded row has the sink anyway.
    lasting = index >= (contexts - rule.capacity)[owner]
    row = torch.where(lasting, rows[owner], shape.blocks_of(1))
    slots = row * rule.capacity + index.clamp(min=0) % rule.capacity
    groups = _complete_groups(batch, rule, before, contexts)
    if groups is None:
        return KiviStep(slots)
    sequence, number, valid = groups
    positions = number[:, None] * rule.group_size + torch.arange(rule.group_size, device=owner.device)
    old = rows[sequence][:, None] * rule.capacity + positions % rule.capacity
    fresh = positions - before[sequence][:, None]
    fresh = torch.where(fresh < 0, -1, fresh + starts[sequence][:, None])
    target = _targets(batch, shape, rule, sequence, number, valid)
    reachable = max(batch.query_lens) > rule.num_recent
    return KiviStep(slots, target, old, fresh.clamp(max=batch.num_tokens - 1) if reachable else None)


def _owners(batch: Batch) -> Tensor:
    """`[T]` the sequence of each token."""
    device = batch.context_lens.device
    if batch.query_len is not None:
        return torch.arange(batch.num_tokens, device=device) // batch.query_len
    owners = np.repeat(np.arange(batch.num_seqs), batch.query_lens)
    return torch.from_numpy(owners).to(device)


def _complete_groups(
    batch: Batch, rule: KiviRule, before: Tensor, contexts: Tensor
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """(sequence, number of the group in it, whether it is complete) of every group that may become old now.

    A step that is not captured lists the complete ones only, so that the third is `None`; `None` when there are none.
    """
    device = contexts.device
    if batch.host_context_lens is not None:
        pairs = [
            (sequence, number)
            for sequence, (context, query) in enumerate(zip(batch.host_context_lens, batch.query_lens, strict=True))
            for number in range(
                rule.num_flushed(context - query) // rule.group_size, rule.num_flushed(context) // rule.group_size
            )
        ]
        listed = torch.tensor(pairs, dtype=torch.int64).to(device)
        return (listed[:, 0], listed[:, 1], None) if pairs else None
    most = -(-max(batch.query_lens) // rule.group_size)
    sequence = torch.arange(batch.num_seqs * most, device=device) // most
    first = rule.flushed(before) // rule.group_size
    number = first[sequence] + torch.arange(batch.num_seqs * most, device=device) % most
    return sequence, number, number < (rule.flushed(contexts) // rule.group_size)[sequence]


def _targets(
    batch: Batch, shape: KVShape, rule: KiviRule, sequence: Tensor, number: Tensor, valid: Tensor | None
) -> Tensor:
    """The groups of the store; those of the sink block where a group is not complete."""
    per_block = shape.block_size // rule.group_size
    tables = batch.tables[0].block_tables
    column = (number // per_block).clamp(max=tables.shape[1] - 1)
    block = tables[sequence, column].to(torch.int64)
    if valid is not None:
        block = torch.where(valid, block, shape.sink_block)
    return block * per_block + number % per_block
