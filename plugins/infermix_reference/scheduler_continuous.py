"""Continuous batching: requests join and leave at every step."""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from infermix.errors import OutOfMemory
from infermix.roles.kv_space import KVSpace, SwapSpace
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.admission import give_back, refuse_oversized, start_cached
from infermix.toolkit.swapped import SwappedQueue


class ContinuousScheduler:
    """Decodes first, then started prompts, then new ones in order of arrival while the token budget lasts.

    Without `chunked`, prompts run whole; the first new one of a step may exceed what is left of the budget, so that
    no prompt waits for ever. With it, prompts are split and the budget is never exceeded.

    When KV for a running sequence runs out, the one that was admitted last is preempted: it gives everything back
    and is computed again later, before anything else that waits. The last one itself pauses instead of being
    preempted, so the first admitted sequence always advances, and every request ends.

    With `swap`, the victim's KV moves to host memory instead; where that is full, it is computed again. What was
    swapped out comes back, the earliest admitted first, before anything new is let in, one step before it runs: its
    copy then overlaps with that step.
    """

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, chunked: bool = False, *, swap: bool = False
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._chunked = chunked
        self._swap = swap
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._swapped = SwappedQueue()
        self._running: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence.seq_id] = sequence

    def finish(self, sequence: Sequence) -> None:
        if self._running.pop(sequence.seq_id, None) is None:
            self._waiting.pop(sequence.seq_id, None)
            self._swapped.discard(sequence)

    def schedule(self, space: KVSpace, now_s: float) -> Plan:
        """Raises `UserError` for a request that even an empty space does not hold."""
        plan = Plan()
        budget, all_served = self._continue(plan, space)
        if all_served:
            budget -= self._resume(plan, space)
        if all_served and not self._swapped:
            self._admit(plan, space, budget)
        return plan

    def _continue(self, plan: Plan, space: KVSpace) -> tuple[int, bool]:
        """Next tokens of what runs; returns the budget left and whether every running sequence got its turn."""
        budget, all_served = self._max_num_batched_tokens, True
        for seq in self._in_turn():
            if seq.seq_id not in self._running:
                continue
            new = self._affordable(seq, budget, space.recompute, alone=not plan.entries)
            if new and self._make_room(seq, seq.num_computed + new, plan, space):
                plan.entries.append(Scheduled(seq, new))
                budget -= seq.num_tokens if space.recompute else new
            else:
                all_served = False
        return budget, all_served and not plan.preempted and not plan.swapped_out

    def _in_turn(self) -> list[Sequence]:
        ready = [seq for seq in self._running.values() if seq.num_uncomputed and not seq.exhausted]
        prompts = [seq for seq in ready if seq.num_uncomputed > 1]
        if not prompts:
            return ready
        return [seq for seq in ready if seq.num_uncomputed == 1] + prompts

    def _affordable(self, seq: Sequence, budget: int, recompute: bool, alone: bool) -> int:
        """New tokens that the budget allows; whole sequences where nothing can be split, but always one of them."""
        new = seq.num_uncomputed
        cost = seq.num_tokens if recompute else new
        if cost <= budget:
            return new
        if self._chunked and not recompute:
            return budget
        return new if alone else 0

    def _make_room(self, seq: Sequence, num_tokens: int, plan: Plan, space: KVSpace) -> bool:
        while not space.reserve(seq.seq_id, num_tokens):
            victim = next(other for other in reversed(self._running.values()) if not other.exhausted)
            if victim is seq:
                if len(self._running) == 1:
                    raise OutOfMemory(f"no KV memory for token {num_tokens} of {seq.request.request_id!r}")
                return False
            self._preempt(victim, plan, space)
        return True

    def _preempt(self, victim: Sequence, plan: Plan, space: KVSpace) -> None:
        del self._running[victim.seq_id]
        plan.entries = [entry for entry in plan.entries if entry.sequence is not victim]
        if self._swap and self._swapped.swap_out(victim, plan, cast(SwapSpace, space)):
            return
        space.release(victim.seq_id)
        victim.num_computed = 0
        self._waiting[victim.seq_id] = victim
        self._waiting.move_to_end(victim.seq_id, last=False)
        plan.preempted.append(victim)

    def _resume(self, plan: Plan, space: KVSpace) -> int:
        """Bring swapped sequences back while they fit; returns how many tokens they run now."""
        planned = 0
        while len(self._running) < self._max_num_seqs:
            seq = self._swapped.swap_in(plan, cast(SwapSpace, space))
            if seq is None:
                break
            self._running[seq.seq_id] = seq
            if not plan.entries:  # nothing runs beside the copy: wait for it rather than for the next step
                planned = self._affordable(seq, self._max_num_batched_tokens, space.recompute, alone=True)
                plan.entries.append(Scheduled(seq, planned))
        return planned

    def _admit(self, plan: Plan, space: KVSpace, budget: int) -> None:
        first = True
        while self._waiting and len(self._running) < self._max_num_seqs:
            seq = next(iter(self._waiting.values()))
            refuse_oversized(seq, space, self._waiting)
            start_cached(seq, space)
            alone = first and not (space.recompute and plan.entries)
            new = self._affordable(seq, budget, space.recompute, alone)
            if not new or not space.reserve(seq.seq_id, seq.num_tokens):
                give_back(seq, space)
                break
            self._running[seq.seq_id] = self._waiting.pop(seq.seq_id)
            plan.entries.append(Scheduled(seq, new))
            budget -= seq.num_tokens if space.recompute else new
            first = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._swapped)

    @property
    def num_running(self) -> int:
        return len(self._running)
