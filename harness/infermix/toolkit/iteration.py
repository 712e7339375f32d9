"""Iteration-level scheduling: requests join and leave at every step. What all such policies have in common."""

from __future__ import annotations

from typing import cast

from infermix.errors import OutOfMemory
from infermix.roles.kv_space import KVSpace, SwapSpace
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.admission import (
    give_back,
    promise_prefix,
    refuse_oversized,
    reserve_next,
    start_cached,
    steps_for,
)
from infermix.toolkit.swapped import SwappedQueue
from infermix.toolkit.waiting import KeyedQueue, Rank, WaitingQueue


class IterationScheduler:
    """Decodes first, then started prompts, then new ones in the order of `waiting` while the token budget lasts.

    Without `chunked`, prompts run whole; the first new one of a step may exceed what is left of the budget, so that
    no prompt waits for ever. With it, prompts are split and the budget is never exceeded; one prompt gets at most
    `max_chunk_tokens` of it. Nobody is let in past a head of the queue that does not fit, and with a `watermark` only
    while that share of the KV stays free for what runs (unless nothing does).

    When KV for a running sequence runs out, the one of the last rank is preempted: it gives everything back and is
    computed again later, before anything else that waits. With `swap`, its KV moves to host memory instead; where
    that is full, it is computed again. What was swapped out comes back before anything new is let in, one step
    before it runs: its copy then overlaps with that step.

    Why every request ends: ranks are fixed at admission and totally ordered. The running sequence of the first rank
    is preempted by nobody (the last one pauses instead of preempting itself), so it advances and ends. Nothing new is
    admitted while a preempted one waits, so the admitted ones, at most `max_num_seqs`, all end in turn. Whether
    everything that waits gets admitted is up to the queue.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked: bool = False,
        *,
        swap: bool = False,
        waiting: WaitingQueue | None = None,
        max_chunk_tokens: int | None = None,
        watermark: float = 0.0,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._chunked, self._swap, self._watermark = chunked, swap, watermark
        self._max_chunk_tokens = max_chunk_tokens
        self._arrived: dict[int, Sequence] = {}
        self._waiting: WaitingQueue = KeyedQueue() if waiting is None else waiting
        self._preempted: dict[int, Sequence] = {}
        self._swapped = SwappedQueue()
        #: What runs, in the order of ranks: its entry in every step that gives it one token.
        self._running: dict[int, Scheduled] = {}
        self._ranks: dict[int, Rank] = {}
        self._all_decode = False

    def add(self, sequence: Sequence) -> None:
        self._arrived[sequence.seq_id] = sequence

    def finish(self, sequence: Sequence) -> None:
        if self._ranks.pop(sequence.seq_id, None) is None:
            if self._arrived.pop(sequence.seq_id, None) is None:
                self._waiting.discard(sequence)
        elif self._running.pop(sequence.seq_id, None) is None:
            self._preempted.pop(sequence.seq_id, None)
            self._swapped.discard(sequence)

    def schedule(self, space: KVSpace, now_s: float) -> Plan:
        """Raises `UserError` for a request that even an empty space does not hold."""
        for sequence in self._arrived.values():
            self._waiting.push(sequence, now_s)
        self._arrived.clear()
        plan = Plan()
        budget, all_served = self._continue(plan, space, self._step_budget())
        num_running = len(self._running)
        if all_served:
            budget -= self._resume(plan, space)
        if all_served and not self._swapped:
            self._admit(plan, space, budget, now_s)
            if self._all_decode and len(plan.entries) == len(self._running) == num_running and self._stays():
                plan.valid_steps = max(1, steps_for(space, num_running))
        return plan

    def _stays(self) -> bool:
        """Whether the next steps will be like this one, in which all that run decoded and nobody was let in."""
        return not self.num_waiting or not self._may_admit(len(self._running)) or self._waits_for_an_end()

    def _waits_for_an_end(self) -> bool:
        """Whether who was not let in for want of KV stays next in line, and out, until somebody ends."""
        return True

    def _step_budget(self) -> int:
        """Most tokens of this step."""
        return self._max_num_batched_tokens

    def _chunk_limit(self, sequence: Sequence) -> int | None:
        """Most tokens of this sequence's prompt in this step, apart from the step's budget; asked when chunked."""
        return self._max_chunk_tokens

    def _may_admit(self, num_running: int) -> bool:
        """Whether one more sequence may join `num_running`, apart from KV and tokens."""
        return num_running < self._max_num_seqs

    def _planned(self, sequence: Sequence, new: int) -> None:
        """Called for every sequence with more than one new token, or newly let in, that gets `new` of them."""

    def _continue(self, plan: Plan, space: KVSpace, budget: int) -> tuple[int, bool]:
        """Next tokens of what runs; returns the budget left and whether every running sequence got its turn."""
        decodes, prompts = self._ready()
        self._all_decode = not prompts
        budget, all_served = self._decode(decodes, plan, space, budget)
        for seq in prompts:
            if seq.seq_id not in self._running:
                continue
            new = self._affordable(seq, budget, space.recompute, alone=not plan.entries)
            if new and self._make_room(seq, seq.num_computed + new, plan, space):
                budget -= self._plan(seq, new, plan, space)
            elif new or budget <= 0 or not self._limited(seq):
                all_served = False
        return budget, all_served and not plan.preempted and not plan.swapped_out

    def _ready(self) -> tuple[list[Scheduled], list[Sequence]]:
        """Entries of running sequences with one new token, and sequences with more."""
        decodes: list[Scheduled] = []
        prompts: list[Sequence] = []
        for entry in self._running.values():
            seq = entry.sequence
            known = len(seq.tokens) + seq.num_inflight
            new = known - seq.num_computed
            if new and known < seq.max_tokens and seq.finish_reason is None:
                if new == 1:
                    decodes.append(entry)
                else:
                    prompts.append(seq)
        return decodes, prompts

    def _decode(self, decodes: list[Scheduled], plan: Plan, space: KVSpace, budget: int) -> tuple[int, bool]:
        """In one go while neither tokens nor KV run out, as in nearly every step of a busy engine."""
        done = 0
        if not space.recompute and budget >= len(decodes):
            done = reserve_next(space, decodes)
            plan.entries = decodes if done == len(decodes) else decodes[:done]
        return self._decode_in_need(decodes[done:], plan, space, budget - done)

    def _decode_in_need(self, decodes: list[Scheduled], plan: Plan, space: KVSpace, budget: int) -> tuple[int, bool]:
        all_served, running, reserve = True, self._running, space.reserve
        for entry in decodes:
            seq = entry.sequence
            if seq.seq_id not in running:
                continue
            cost = seq.num_tokens if space.recompute else 1
            needed = seq.num_computed + 1
            affordable = cost <= budget or (not plan.entries and (space.recompute or not self._chunked))
            if affordable and (reserve(seq.seq_id, needed) or self._make_room(seq, needed, plan, space)):
                plan.entries.append(entry)
                budget -= cost
            else:
                all_served = False
        return budget, all_served

    def _plan(self, seq: Sequence, new: int, plan: Plan, space: KVSpace) -> int:
        """Enter a sequence; returns what it costs of the budget."""
        plan.entries.append(Scheduled(seq, new))
        self._planned(seq, new)
        return seq.num_tokens if space.recompute else new

    def _affordable(self, seq: Sequence, budget: int, recompute: bool, alone: bool) -> int:
        """New tokens that the budget allows; whole sequences where nothing can be split, but always one of them."""
        new = seq.num_uncomputed
        if self._chunked and not recompute:
            limit = self._chunk_limit(seq) if new > 1 else None
            return max(0, min(new, budget) if limit is None else min(new, budget, limit))
        cost = seq.num_tokens if recompute else new
        return new if cost <= budget or alone else 0

    def _limited(self, seq: Sequence) -> bool:
        """Whether its own limit, not the step's budget, keeps a prompt from going on."""
        return self._chunked and seq.num_uncomputed > 1 and self._chunk_limit(seq) == 0

    def _make_room(self, seq: Sequence, num_tokens: int, plan: Plan, space: KVSpace) -> bool:
        while not space.reserve(seq.seq_id, num_tokens):
            running = reversed(self._running.values())
            victim = next(other.sequence for other in running if not other.sequence.exhausted)
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
        self._preempted[victim.seq_id] = victim
        plan.preempted.append(victim)

    def _resume(self, plan: Plan, space: KVSpace) -> int:
        """Bring swapped sequences back while they fit; returns how many tokens they run now."""
        planned = 0
        while len(self._running) < self._max_num_seqs:
            seq = self._swapped.swap_in(plan, cast(SwapSpace, space))
            if seq is None:
                break
            self._enter(seq, self._ranks[seq.seq_id])
            if not plan.entries:  # nothing runs beside the copy: wait for it rather than for the next step
                new = self._affordable(seq, self._max_num_batched_tokens, space.recompute, alone=True)
                planned = self._plan(seq, new, plan, space) if new else 0
        return planned

    def _admit(self, plan: Plan, space: KVSpace, budget: int, now_s: float) -> None:
        first = True
        while (seq := self._next(now_s)) is not None:
            refuse_oversized(seq, space, self.finish)
            start_cached(seq, space)
            alone = first and not (space.recompute and plan.entries)
            new = self._affordable(seq, budget, space.recompute, alone)
            if not new or not self._fits_above_watermark(seq, space) or not space.reserve(seq.seq_id, seq.num_tokens):
                give_back(seq, space)
                break
            self._take(seq)
            budget -= self._plan(seq, new, plan, space)
            promise_prefix(seq, new, space)
            first = False

    def _next(self, now_s: float) -> Sequence | None:
        """Who has been preempted first, in the order of ranks, then the head of the queue."""
        if self._preempted:
            free = len(self._running) < self._max_num_seqs
            return min(self._preempted.values(), key=lambda seq: self._ranks[seq.seq_id]) if free else None
        return self._waiting.head(now_s) if self._may_admit(len(self._running)) else None

    def _take(self, seq: Sequence) -> None:
        if self._preempted.pop(seq.seq_id, None) is not None:
            self._enter(seq, self._ranks[seq.seq_id])
        else:
            rank, popped = self._waiting.pop()
            assert popped is seq, "the queue gave away another sequence than its head"
            self._ranks[seq.seq_id] = rank
            self._enter(seq, rank)

    def _enter(self, seq: Sequence, rank: Rank) -> None:
        """Running sequences are kept in the order of their ranks."""
        last = next(reversed(self._running), None)
        self._running[seq.seq_id] = Scheduled(seq, 1)
        if last is not None and self._ranks[last] > rank:
            self._running = dict(sorted(self._running.items(), key=lambda item: self._ranks[item[0]]))

    def _fits_above_watermark(self, seq: Sequence, space: KVSpace) -> bool:
        if not self._watermark or not self._running:
            return True
        usage = space.usage()
        return usage.allocated_tokens + seq.num_uncomputed <= (1 - self._watermark) * usage.capacity_tokens

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._waiting) + len(self._preempted) + len(self._swapped)

    @property
    def num_running(self) -> int:
        return len(self._running)
