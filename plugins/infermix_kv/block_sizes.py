"""How many blocks one pool gets; shared by the layouts that have a single block table. No torch."""

from __future__ import annotations

from infermix.errors import UserError
from infermix.roles.kv_space import KVBudget


def pool_blocks(block_bytes: int, blocks_per_seq: int, budget: KVBudget) -> int:
    """Blocks for all sequences at their most, or what `max_bytes` holds beside the sink block.

    Raises `UserError` when that is less than one sequence needs.
    """
    count = blocks_per_seq * budget.max_num_seqs
    if budget.max_bytes is not None and block_bytes:
        count = min(count, budget.max_bytes // block_bytes - 1)
    if count < blocks_per_seq:
        raise UserError(
            f"{budget.max_bytes} bytes of KV memory do not hold one sequence of {budget.max_model_len} tokens",
            key="limits.kv_memory_bytes",
            hint=f"at least {block_bytes * (blocks_per_seq + 1)} bytes are needed",
        )
    return count
