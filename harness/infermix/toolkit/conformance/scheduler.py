"""Conformance of schedulers: an engine without a model, over a KV space that counts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from infermix.errors import OutOfMemory, UserError
from infermix.roles.component import Component
from infermix.roles.kv_space import BlockMoves, KVUsage
from infermix.roles.request import FinishReason, Request, SamplingParams, Sequence
from infermix.roles.scheduler import Plan, Scheduler
from infermix.toolkit.host_blocks import HostBlocks


@dataclass
class CountingSpace:
    """Blocks as numbers. Refuses what does not fit and knows who holds what."""

    num_blocks: int
    block_size: int = 4
    recompute: bool = False
    fixed_rows: bool = False
    held: dict[int, int] = field(default_factory=dict)
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        self.host = HostBlocks([self.num_host_blocks], self.block_size, [-1])

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_used(self) -> int:
        return sum(self._blocks(tokens) for tokens in self.held.values())

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        old = self.held.get(seq_id, 0)
        more = self._blocks(max(num_tokens, old)) - self._blocks(old)
        if self.num_used + more > self.num_blocks:
            return False
        self.held[seq_id] = max(num_tokens, old)
        return True

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        self.held[seq_id] = min(num_tokens, self.held[seq_id])

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        return [] if self.reserve(child_id, num_tokens or self.held[parent_id]) else None

    def release(self, seq_id: int) -> None:
        if self.held.pop(seq_id, None) is None:
            self.host.release(seq_id)

    def swap_out(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        return self.host.swap_out(self, seq_id, num_tokens)

    def swap_in(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        assert seq_id not in self.held, f"sequence {seq_id} is on the device already"
        return self.host.swap_in(self, seq_id, num_tokens)

    def block_table(self, seq_id: int, table: int = 0) -> Many[int]:
        return range(self._blocks(self.held[seq_id]))

    def fits(self, num_tokens: int) -> bool:
        return self._blocks(num_tokens) <= self.num_blocks

    def usage(self) -> KVUsage:
        size = self.block_size
        return KVUsage(self.num_used * size, sum(self.held.values()), self.num_blocks * size)


@dataclass
class CachingSpace(CountingSpace):
    """Finds the first `cached` tokens of everything, and knows who was served so."""

    cached: int = 8
    served: dict[int, int] = field(default_factory=dict)

    def match(self, seq_id: int, token_ids: Many[int], max_tokens: int, salt: str = "") -> int:
        assert seq_id not in self.held, f"sequence {seq_id} holds KV and asks for a cached prefix"
        assert 0 <= max_tokens <= len(token_ids), f"{max_tokens} of {len(token_ids)} tokens may come from a cache"
        hit = min(self.cached, max_tokens)
        if not hit or not self.reserve(seq_id, hit):
            return 0
        self.served[seq_id] = hit
        return hit


def make_sequence(seq_id: int, prompt: int, output: int) -> Sequence:
    """A new sequence with `prompt` tokens that stops after `output` more."""
    sampling = SamplingParams(max_new_tokens=output)
    request = Request(request_id=f"r{seq_id}", prompt_ids=(1,) * prompt, sampling=sampling)
    return Sequence(seq_id, request, [1] * prompt, prompt)


def check_scheduler(component: Component, options: Any = None, *, max_num_seqs: int = 4) -> None:
    """Roomy and tight KV, recompute, tokens read one step late, arrivals while running, a request that never fits.

    Where the space has a prefix cache, every sequence that is let in has to be served from it first.
    """
    options = component.options() if options is None else options

    def build() -> Scheduler:
        return component.build(options, max_num_seqs)

    lengths = [(3, 5), (17, 2), (1, 1), (9, 20), (30, 3), (2, 12), (6, 6), (5, 1), (8, 9)]
    longest = max(prompt + output for prompt, output in lengths)
    for lag in (0, 1):
        for blocks in (-(-longest // 4), -(-longest // 4) + 3, 100):
            for host in (0, 3, 100):
                space = CountingSpace(blocks, num_host_blocks=host)
                run_to_end(build(), space, lengths, max_num_seqs=max_num_seqs, lag=lag)
        space = CountingSpace(100, recompute=True)
        run_to_end(build(), space, lengths, max_num_seqs=max_num_seqs, lag=lag)
        for blocks in (-(-longest // 4), 100):
            caching = CachingSpace(blocks)
            run_to_end(build(), caching, lengths, max_num_seqs=max_num_seqs, lag=lag)
            wanted = {index for index, (prompt, _) in enumerate(lengths) if prompt > 1}
            assert wanted <= set(caching.served), "a sequence was let in without asking for its cached prefix"
    _check_oversized(build())


def run_to_end(
    scheduler: Scheduler,
    space: CountingSpace,
    lengths: Many[tuple[int, int]],
    *,
    max_num_seqs: int,
    lag: int = 0,
    arrive_every: int = 0,
) -> int:
    """Serve requests of (prompt, output) tokens until all have ended; returns the number of steps.

    `lag` 1 reads sampled tokens one step late, as an engine that overlaps does. `arrive_every` n lets one request
    arrive every n steps instead of all at once. Asserts that each plan keeps its promises and that all requests end
    within as many steps as serving them one after the other would take, arrivals included.
    """
    late = [make_sequence(index, *length) for index, length in enumerate(lengths)]
    alone = sum(prompt + 2 * (output + 1) for prompt, output in lengths)
    limit = 3 * alone + (len(late) + 1) * (arrive_every + 1) + 10
    engine = _Engine(scheduler, space, max_num_seqs, lag)
    steps = 0
    while late or engine.alive:
        if late and (not arrive_every or steps % arrive_every == 0):
            for seq in [late.pop(0)] if arrive_every else late:
                engine.add(seq)
            late = late if arrive_every else []
        engine.step()
        steps += 1
        waiting = [seq.request.request_id for seq in engine.alive.values()]
        assert steps <= limit, f"{len(waiting)} requests have not ended after {steps} steps: {waiting}"
    assert not scheduler.num_waiting, "requests still wait after all have ended"
    assert not scheduler.num_running, "requests still run after all have ended"
    assert not space.usage().allocated_tokens, "KV is still held after all have ended"
    assert not space.host.num_used, "host memory is still held after all have ended"
    return steps


class _Engine:
    def __init__(self, scheduler: Scheduler, space: CountingSpace, max_num_seqs: int, lag: int) -> None:
        self.scheduler, self.space, self.max_num_seqs, self.lag = scheduler, space, max_num_seqs, lag
        self.alive: dict[int, Sequence] = {}
        self.inflight: list[list[Sequence]] = []
        self.now_s = 0.0

    def add(self, seq: Sequence) -> None:
        self.alive[seq.seq_id] = seq
        self.scheduler.add(seq)

    def step(self) -> None:
        try:
            plan = self.scheduler.schedule(self.space, self.now_s)
        except OutOfMemory as error:
            raise AssertionError(f"KV ran out although every request fits: {error}") from error
        self.check(plan)
        sampled = []
        for entry in plan.entries:
            seq = entry.sequence
            seq.num_cached = 0
            seq.num_computed += entry.num_new_tokens
            if not seq.num_uncomputed:
                seq.num_inflight += 1
                sampled.append(seq)
        self.inflight.append(sampled)
        if len(self.inflight) > self.lag or not plan.entries:
            self.collect(self.inflight.pop(0))
        self.pass_time(plan)

    def pass_time(self, plan: Plan) -> None:
        """A step takes 10 ms and 0.1 ms per token; a plan that waits is taken at its word."""
        step_s = 0.01 + 1e-4 * plan.num_new_tokens
        self.now_s = self.now_s + step_s if plan.wake_s is None else max(self.now_s, plan.wake_s)
        if plan.entries and hasattr(self.scheduler, "observe"):
            self.scheduler.observe(step_s, plan)

    def collect(self, sampled: list[Sequence]) -> None:
        for seq in sampled:
            seq.num_inflight -= 1
            seq.tokens.append(1)
            if len(seq.tokens) - seq.num_prompt_tokens >= seq.request.sampling.max_new_tokens:
                seq.finish_reason = FinishReason.LENGTH
                self.space.release(seq.seq_id)
                self.scheduler.finish(seq)
                del self.alive[seq.seq_id]

    def check(self, plan: Plan) -> None:
        ids = [entry.sequence.seq_id for entry in plan.entries]
        assert len(set(ids)) == len(ids), f"a sequence is scheduled twice: {ids}"
        assert len(ids) <= self.max_num_seqs, f"{len(ids)} sequences scheduled, {self.max_num_seqs} allowed"
        assert self.scheduler.num_running <= self.max_num_seqs, f"{self.scheduler.num_running} sequences are running"
        assert plan.valid_steps >= 1, f"a plan is valid for {plan.valid_steps} steps"
        assert plan.wake_s is None or (plan.wake_s > self.now_s and not ids), (
            f"a plan waits until {plan.wake_s} s at {self.now_s} s and runs {len(ids)} sequences"
        )
        for entry in plan.entries:
            self.check_entry(entry.sequence, entry.num_new_tokens)
        for seq in plan.preempted:
            assert seq.seq_id not in ids, f"{seq.request.request_id} is preempted and scheduled in one plan"
            assert seq.seq_id not in self.space.held, f"preempted {seq.request.request_id} still holds KV"
            assert seq.num_computed == 0, f"preempted {seq.request.request_id} still counts computed tokens"
        self.check_swaps(plan, ids)
        usage = self.space.usage()
        assert usage.allocated_tokens <= usage.capacity_tokens, f"more KV than there is: {usage}"

    def check_swaps(self, plan: Plan, ids: Many[int]) -> None:
        """Every swap is booked and told, in one direction per sequence; who is on the host neither runs nor loses."""
        moved = {(move.seq_id, move.to_host) for move in plan.moves}
        told = {(seq.seq_id, True) for seq in plan.swapped_out} | {(seq.seq_id, False) for seq in plan.swapped_in}
        assert moved == told, f"copies {sorted(moved)} were booked, {sorted(told)} are in the plan"
        assert len(plan.moves) == len(told), "a sequence is moved twice in one plan"
        ways = [move.to_host for move in plan.moves]
        assert ways == sorted(ways, reverse=True), "a sequence is swapped out after another came back in one plan"
        for seq in plan.swapped_out:
            name = seq.request.request_id
            assert seq.seq_id not in ids, f"{name} is swapped out and scheduled in one plan"
            assert seq.seq_id not in self.space.held, f"swapped-out {name} still holds KV"
            assert seq.num_computed > 0, f"swapped-out {name} lost its computed tokens"

    def check_entry(self, seq: Sequence, num_new_tokens: int) -> None:
        name = seq.request.request_id
        assert not seq.exhausted, f"{name} has nothing left to launch and is scheduled"
        assert 0 < num_new_tokens <= seq.num_uncomputed, (
            f"{name} gets {num_new_tokens} of {seq.num_uncomputed} tokens"
        )
        served = getattr(self.space, "served", {}).get(seq.seq_id, 0) if seq.num_cached else 0
        assert seq.num_computed >= served, f"{name} computes tokens that a cache has served"
        wanted = seq.num_computed + num_new_tokens
        assert self.space.reserve(seq.seq_id, wanted), f"KV for token {wanted} of {name} was not reserved"


def _check_oversized(scheduler: Scheduler) -> None:
    """A request that an empty space does not hold is refused by name, and the others still run."""
    space = CountingSpace(num_blocks=4)
    engine = _Engine(scheduler, space, 4, 0)
    refused, twice = None, False
    for seq in (make_sequence(0, 4, 4), make_sequence(1, 90, 4), make_sequence(2, 4, 4)):
        try:
            engine.add(seq)
        except UserError as error:
            refused = error
            del engine.alive[seq.seq_id]
    for _ in range(200):
        if not engine.alive:
            break
        try:
            engine.step()
        except UserError as error:
            refused, twice = error, twice or 1 not in engine.alive
            engine.alive.pop(1, None)
    assert not twice, f"a refused request is refused again: {refused}"
    assert refused is not None, "a request of 94 tokens was accepted by a space of 16"
    assert "r1" in str(refused), f"the refusal does not name the request: {refused}"
    assert not engine.alive, f"after the refusal these did not end: {sorted(engine.alive)}"
