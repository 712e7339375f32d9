"""Figures of the KV memory of one repeat, from the engine's counters; an engine that does not count has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from infermix.record.record import Repeat

Better = Literal["higher", "lower", "none"]

#: Unit and direction. Fragmentation is the share of allocated slots that hold no token, over all steps and in the
#: worst one; tail waste the part of it at the end of last blocks and rows, the rest being reserved ahead.
KV_FIGURES: Mapping[str, tuple[str, Better]] = {
    "kv_fragmentation_mean": ("", "lower"),
    "kv_fragmentation_max": ("", "lower"),
    "kv_tail_waste_mean": ("", "lower"),
    "prefix_hit_rate": ("", "higher"),
    "prefix_hits": ("requests", "none"),
    "prefix_hit_tokens": ("tokens", "none"),
    "resumed_hit_tokens": ("tokens", "none"),
    "prefix_evicted_blocks": ("blocks", "none"),
    "kv_copied_blocks": ("blocks", "none"),
    "kv_kept_fraction": ("", "higher"),
    "kv_dropped_tokens": ("tokens", "lower"),
    "preemptions": ("", "lower"),
    "swap_stall_s": ("s", "lower"),
    "swap_out_bytes_per_s": ("bytes/s", "higher"),
    "swap_in_bytes_per_s": ("bytes/s", "higher"),
}


def kv_figures(repeat: Repeat) -> dict[str, float]:
    """`prefix_...` only where a prefix cache is on; hit tokens are prompt tokens that were not computed.

    What was kept and dropped is of layouts that drop tokens alone, preemptions and swaps where any were.
    """
    counters = repeat.environment.get("counters", {})
    return {**_slots(counters), **_prefixes(counters), **_dropped(counters), **_preempted(counters)}


def _slots(counters: Mapping[str, float]) -> dict[str, float]:
    allocated = counters.get("allocated_tokens_sum", 0)
    if not allocated or "reserved_tokens_sum" not in counters:
        return {}
    return {
        "kv_fragmentation_mean": 1 - counters["used_tokens_sum"] / allocated,
        "kv_fragmentation_max": counters["kv_fragmentation_max"],
        "kv_tail_waste_mean": 1 - counters["reserved_tokens_sum"] / allocated,
    }


def _prefixes(counters: Mapping[str, float]) -> dict[str, float]:
    queried = counters.get("prefix_queried_tokens", 0)
    if not queried:
        return {}
    names = ("prefix_hits", "prefix_hit_tokens", "resumed_hit_tokens", "prefix_evicted_blocks", "kv_copied_blocks")
    counts = {name: counters[name] for name in names if name in counters}
    return {"prefix_hit_rate": counters["prefix_hit_tokens"] / queried, **counts}


def _dropped(counters: Mapping[str, float]) -> dict[str, float]:
    ended = counters.get("kv_ended_tokens", 0)
    if not ended:
        return {}
    dropped = counters["kv_dropped_tokens"]
    return {"kv_kept_fraction": 1 - dropped / ended, "kv_dropped_tokens": dropped}


def _preempted(counters: Mapping[str, float]) -> dict[str, float]:
    names = ["preemptions"] if counters.get("preemptions") else []
    if counters.get("swaps_out"):
        names += ["swap_stall_s", "swap_out_bytes_per_s", "swap_in_bytes_per_s"]
    return {name: counters[name] for name in names if name in counters}
