"""How many sequences a machine's memory holds in a KV layout: from the layout's own `shape`, no torch."""

from __future__ import annotations

from dataclasses import replace

from infermix.cost.memory import USABLE_SHARE, MemoryPrediction
from infermix.roles.engine import EngineContext
from infermix.roles.facts import MachineFacts
from infermix.roles.kv_space import KVBudget, KVGroup, KVLayout

#: Kept free on a GPU for activations when the KV gets a share of the device.
_RESERVE_BYTES = 2 << 30
#: Nobody runs more at once; a layout that still fits is not bounded by memory.
_MOST_SEQUENCES = 1 << 20


def kv_limit(
    machine: MachineFacts, others: MemoryPrediction, stated_bytes: int | None, fraction: float | None
) -> int | None:
    """Bytes that an engine gives to the KV; `None` on a CPU without a stated limit: as much as the sequences need.

    `others` is what the cell takes besides. On a GPU the KV gets what `fraction` of the device leaves.
    """
    if stated_bytes is not None or machine.device == "cpu":
        return stated_bytes
    share = int((fraction or EngineContext.kv_memory_fraction) * machine.memory_bytes)
    return max(0, share - others.total_bytes - _RESERVE_BYTES)


def kv_room(machine: MachineFacts, others: MemoryPrediction, stated_bytes: int | None, fraction: float | None) -> int:
    """Bytes that the KV may take at most: the limit, or on a CPU what a fraction of its memory leaves.

    Without a stated fraction that is the usable share of predictions.
    """
    limit = kv_limit(machine, others, stated_bytes, fraction)
    if limit is not None:
        return limit
    return max(0, int((fraction or USABLE_SHARE) * machine.memory_bytes) - others.total_bytes)


def sequences_that_fit(
    layout: KVLayout, groups: tuple[KVGroup, ...], budget: KVBudget, room_bytes: int
) -> int | None:
    """The most sequences of `budget.max_model_len` tokens whose shape takes at most `room_bytes`.

    `None` when memory does not bound them. The bytes must not shrink when sequences are added.
    """

    def fits(count: int) -> bool:
        return layout.shape(groups, replace(budget, max_num_seqs=count, max_bytes=None)).bytes <= room_bytes

    if fits(_MOST_SEQUENCES):
        return None
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
