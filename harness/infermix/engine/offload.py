"""Host memory for swapped-out sequences, for engines whose parts swap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infermix.errors import UserError
from infermix.toolkit.block_swapper import BlockSwapper
from infermix.toolkit.host_blocks import with_host_blocks

if TYPE_CHECKING:
    from infermix.roles.engine import EngineContext, EngineReport
    from infermix.roles.kv_space import KVShape
    from infermix.roles.kv_store import KVStore


def swaps(context: EngineContext) -> bool:
    """Whether a chosen part moves sequences to the host (it needs `kv:swap`)."""
    choices = (*context.parts.values(), *context.transforms)
    return any(
        "kv:swap" in choice.component.needs(choice.options, context.facts, context.machine) for choice in choices
    )


def with_swap_space(shape: KVShape, context: EngineContext, replicas: int) -> KVShape:
    """`shape` with the host blocks of one of `replicas` engines, which share the stated memory.

    Raises `UserError` when nobody said how much host memory may be taken.
    """
    if context.kv_swap_bytes is None:
        raise UserError(
            "a part swaps sequences to host memory, whose size is not stated",
            key="limits.kv_swap_bytes",
            hint="give a number of bytes, or preempt by recomputing",
        )
    return with_host_blocks(shape, context.kv_swap_bytes, replicas)


def make_swapper(context: EngineContext, store: KVStore, shape: KVShape, report: EngineReport) -> BlockSwapper | None:
    """The copies' executor, with its host memory allocated; `None` where no part swaps."""
    if not swaps(context):
        return None
    swapper = BlockSwapper(store, shape, torch.device(context.machine.device), context.clock_ns)
    facts = report.executed.setdefault("engine", {})
    facts["swap_host_bytes"] = facts.get("swap_host_bytes", 0) + swapper.host_bytes  # of all replicas
    facts["swap_host_blocks"] = list(shape.host_blocks)
    return swapper
