"""What the engine counts about its KV: slots over time, and tokens that a prefix cache saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infermix.roles.kv_space import KVSpace
    from infermix.roles.request import Sequence

#: Sums over steps, in slots: allocated to sequences; of those, reserved for a token; of those, holding one.
_SLOTS = ("allocated_tokens_sum", "reserved_tokens_sum", "used_tokens_sum")
#: Sequences let in and their prompt tokens; those of them with a hit, and the tokens that it saved. A sequence that
#: was preempted and finds its own prefix again is counted apart.
#: `prefix_kept_tokens` are those of `prefix_queried_tokens` that may come from earlier repeats.
_PREFIXES = (
    "prefix_queries", "prefix_queried_tokens", "prefix_hits", "prefix_hit_tokens", "resumed_hit_tokens",
    "prefix_kept_tokens",
)  # fmt: skip


class KVCounters:
    """Sampled once a step, after the launch. Cost: one addition per sequence that runs."""

    def __init__(self, space: KVSpace) -> None:
        self._space = space
        self._has_prefixes = hasattr(space, "match")
        self._keeps = bool(getattr(space, "keeps_prefixes", False))
        self._holders: dict[int, Sequence] = {}
        self.reset()

    def reset(self) -> None:
        names = (*_SLOTS, "kv_fragmentation_max", *(_PREFIXES if self._has_prefixes else ()))
        self._counts = dict.fromkeys(names, 0.0)
        if hasattr(self._space, "reset_counters"):
            self._space.reset_counters()

    def begin(self, sequence: Sequence) -> None:
        """The sequence is launched for the first time since it was let in."""
        self._holders[sequence.seq_id] = sequence
        cached, sequence.num_cached = sequence.num_cached, 0
        is_fork = sequence.num_computed > cached
        if is_fork or not self._has_prefixes:
            return
        if sequence.num_preemptions:
            self._counts["resumed_hit_tokens"] += cached
            return
        self._counts["prefix_queries"] += 1
        self._counts["prefix_queried_tokens"] += sequence.num_prompt_tokens
        self._counts["prefix_kept_tokens"] += sequence.num_prompt_tokens if self._keeps else 0
        self._counts["prefix_hits"] += cached > 0
        self._counts["prefix_hit_tokens"] += cached

    def end(self, sequence: Sequence) -> None:
        """The sequence gave its KV back."""
        self._holders.pop(sequence.seq_id, None)

    def sample(self) -> None:
        usage, counts = self._space.usage(), self._counts
        used = usage.used_tokens
        if usage.reserved_tokens is not None:
            # Shared slots count once per sequence on both sides: what is left was reserved ahead by one sequence.
            computed = sum(sequence.num_computed for sequence in self._holders.values())
            used -= max(0, usage.reserved_tokens - computed)
        counts["allocated_tokens_sum"] += usage.allocated_tokens
        counts["reserved_tokens_sum"] += usage.used_tokens
        counts["used_tokens_sum"] += used
        if usage.allocated_tokens:
            share = 1 - used / usage.allocated_tokens
            counts["kv_fragmentation_max"] = max(counts["kv_fragmentation_max"], share)

    def counters(self) -> dict[str, float]:
        own = self._space.counters() if hasattr(self._space, "counters") else {}
        return {**self._counts, **own}
