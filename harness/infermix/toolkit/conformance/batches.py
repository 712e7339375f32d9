"""Small batches on a device, as an engine would pack them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infermix.roles import request
from infermix.roles.batch import Batch, GroupBatch
from infermix.roles.scheduler import Scheduled


def make_batch(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    sink_block: int,
    num_groups: int = 1,
    width: int | None = None,
    captured: bool = False,
    capacity: int | None = None,
    device: str = "cpu",
) -> Batch:
    """Sequences with context 0 are padding: their tokens go to the sink block.

    `width` is the width of the block tables, `capacity` the bound on contexts of a captured batch.
    """
    width = width or max(max(len(table) for table in block_tables), 1)
    tables = [[*table, *[sink_block] * (width - len(table))] for table in block_tables]
    positions = [
        max(context - query + offset, 0)
        for query, context in zip(query_lens, context_lens, strict=True)
        for offset in range(query)
    ]
    owners = [index for index, query in enumerate(query_lens) for _ in range(query)]
    slots = [
        tables[owner][position // block_size] * block_size + position % block_size
        for owner, position in zip(owners, positions, strict=True)
    ]
    ends = torch.tensor([0, *query_lens]).cumsum(0)
    group = GroupBatch(
        torch.tensor(slots, dtype=torch.int64, device=device), torch.tensor(tables, dtype=torch.int32, device=device)
    )
    uniform = len(set(query_lens)) == 1
    return Batch(
        input_ids=torch.zeros(len(slots), dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        cu_seqlens_q=ends.to(device=device, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        logits_rows=(ends[1:] - 1).to(device),
        groups=(group,) * num_groups,
        query_lens=tuple(query_lens),
        host_context_lens=None if captured else tuple(context_lens),
        query_len=query_lens[0] if uniform else None,
        context_capacity=capacity or max(context_lens),
        host_rows=None if captured else tuple(table[0] for table in tables),
    )


def next_token(seq_id: int, num_computed: int) -> Scheduled:
    """One new token of a sequence that has computed so many, as a scheduler plans it."""
    asked = request.Request(request_id=str(seq_id), prompt_ids=(0,))
    sequence = request.Sequence(seq_id, asked, [], num_computed, num_computed=num_computed)
    return Scheduled(sequence, 1)
