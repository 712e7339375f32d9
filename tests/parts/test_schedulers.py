"""Policies of the reference schedulers, and properties over random loads."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infermix.errors import OutOfMemory, UserError
from infermix.roles.request import FinishReason, Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.conformance import run_to_end
from infermix.toolkit.conformance.scheduler import CountingSpace, make_sequence
from infermix_reference.scheduler_continuous import ContinuousScheduler
from infermix_reference.scheduler_static import StaticScheduler

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 25)), min_size=1, max_size=14)


@settings(max_examples=120, deadline=None)
@given(
    lengths=LENGTHS,
    spare=st.integers(0, 30),
    block_size=st.integers(1, 9),
    budget=st.integers(1, 64),
    chunked=st.booleans(),
    max_num_seqs=st.integers(1, 6),
    recompute=st.booleans(),
    lag=st.integers(0, 1),
    arrive_every=st.integers(0, 4),
)
def test_continuous_serves_everyone_in_any_space_that_fits_the_largest(
    lengths: list[tuple[int, int]],
    spare: int,
    block_size: int,
    budget: int,
    chunked: bool,
    max_num_seqs: int,
    recompute: bool,
    lag: int,
    arrive_every: int,
) -> None:
    largest = max(prompt + output for prompt, output in lengths)
    space = CountingSpace(-(-largest // block_size) + spare, block_size, recompute=recompute)
    scheduler = ContinuousScheduler(max_num_seqs, budget, chunked)
    run_to_end(scheduler, space, lengths, max_num_seqs=max_num_seqs, lag=lag, arrive_every=arrive_every)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, spare=st.integers(0, 30), batch_size=st.integers(1, 6), lag=st.integers(0, 1))
def test_static_serves_everyone(lengths: list[tuple[int, int]], spare: int, batch_size: int, lag: int) -> None:
    largest = max(prompt + output for prompt, output in lengths)
    space = CountingSpace(-(-largest // 4) + spare)
    run_to_end(StaticScheduler(batch_size), space, lengths, max_num_seqs=batch_size, lag=lag)


def _advance(plan: Plan) -> None:
    for entry in plan.entries:
        seq = entry.sequence
        seq.num_computed += entry.num_new_tokens
        if not seq.num_uncomputed:
            seq.tokens.append(1)


def _given(plan: Plan) -> list[tuple[int, int]]:
    return [(entry.sequence.seq_id, entry.num_new_tokens) for entry in plan.entries]


def _end(scheduler: Any, space: CountingSpace, seq: Sequence) -> None:
    seq.finish_reason = FinishReason.LENGTH
    space.release(seq.seq_id)
    scheduler.finish(seq)


def test_static_waits_until_the_whole_batch_has_ended() -> None:
    scheduler, space = StaticScheduler(2), CountingSpace(100)
    sequences = [make_sequence(index, 4, output) for index, output in enumerate((1, 3, 2))]
    for seq in sequences:
        scheduler.add(seq)
    first = scheduler.schedule(space, 0.0)
    assert _given(first) == [(0, 4), (1, 4)]
    _advance(first)
    _end(scheduler, space, sequences[0])
    assert _given(scheduler.schedule(space, 0.0)) == [(1, 1)]
    _end(scheduler, space, sequences[1])
    assert _given(scheduler.schedule(space, 0.0)) == [(2, 4)]


def test_static_starts_only_what_fits_to_its_end() -> None:
    scheduler, space = StaticScheduler(8), CountingSpace(num_blocks=5, block_size=4)
    for index in range(3):
        scheduler.add(make_sequence(index, 2, 7))
    assert _given(scheduler.schedule(space, 0.0)) == [(0, 2), (1, 2)]


def test_continuous_admits_at_any_step_with_decodes_first() -> None:
    scheduler, space = ContinuousScheduler(4, 64), CountingSpace(100)
    scheduler.add(make_sequence(0, 5, 9))
    _advance(scheduler.schedule(space, 0.0))
    scheduler.add(make_sequence(1, 7, 9))
    assert _given(scheduler.schedule(space, 0.0)) == [(0, 1), (1, 7)]


def test_whole_prompts_share_the_budget_and_the_first_may_exceed_it() -> None:
    scheduler, space = ContinuousScheduler(8, 20), CountingSpace(100)
    for index, prompt in enumerate((12, 6, 9, 50, 3)):
        scheduler.add(make_sequence(index, prompt, 9))
    given = []
    for _ in range(4):
        plan = scheduler.schedule(space, 0.0)
        given.append([pair for pair in _given(plan) if pair[1] > 1])
        _advance(plan)
    assert given == [[(0, 12), (1, 6)], [(2, 9)], [(3, 50)], [(4, 3)]]


def test_chunked_prompts_never_exceed_the_budget() -> None:
    scheduler, space = ContinuousScheduler(8, 10, chunked=True), CountingSpace(100)
    scheduler.add(make_sequence(0, 3, 30))
    scheduler.add(make_sequence(1, 25, 30))
    given = []
    for _ in range(4):
        plan = scheduler.schedule(space, 0.0)
        given.append(_given(plan))
        _advance(plan)
    assert given == [[(0, 3), (1, 7)], [(0, 1), (1, 9)], [(0, 1), (1, 9)], [(0, 1), (1, 1)]]


def test_recompute_counts_whole_sequences() -> None:
    scheduler, space = ContinuousScheduler(8, 20), CountingSpace(100, recompute=True)
    for index in range(3):
        scheduler.add(make_sequence(index, 9, 9))
    plan = scheduler.schedule(space, 0.0)
    assert _given(plan) == [(0, 9), (1, 9)]
    _advance(plan)
    assert _given(scheduler.schedule(space, 0.0)) == [(0, 1), (1, 1)]


def test_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    scheduler, space = ContinuousScheduler(8, 64), CountingSpace(num_blocks=4, block_size=4)
    first, second, third = (make_sequence(index, prompt, 9) for index, prompt in enumerate((4, 8, 4)))
    for seq in (first, second, third):
        scheduler.add(seq)
    plan = scheduler.schedule(space, 0.0)
    assert _given(plan) == [(0, 4), (1, 8), (2, 4)]
    _advance(plan)
    plan = scheduler.schedule(space, 0.0)
    assert [seq.seq_id for seq in plan.preempted] == [2]
    assert _given(plan) == [(0, 1)]
    assert (third.num_computed, third.seq_id in space.held) == (0, False)
    _end(scheduler, space, first)
    _end(scheduler, space, second)
    scheduler.add(make_sequence(3, 2, 2))
    assert _given(scheduler.schedule(space, 0.0)) == [(2, 5), (3, 2)]


def test_space_that_lies_is_out_of_memory_not_a_hang() -> None:
    class Liar(CountingSpace):
        def fits(self, num_tokens: int) -> bool:
            return True

    scheduler, space = ContinuousScheduler(8, 64), Liar(num_blocks=1, block_size=4)
    scheduler.add(make_sequence(0, 4, 9))
    _advance(scheduler.schedule(space, 0.0))
    with pytest.raises(OutOfMemory, match="'r0'"):
        scheduler.schedule(space, 0.0)


@pytest.mark.parametrize("scheduler", [ContinuousScheduler(4, 64), StaticScheduler(4)])
def test_oversized_request_is_named_with_its_parts(scheduler: Any) -> None:
    scheduler.add(make_sequence(7, 30, 12))
    with pytest.raises(UserError, match=r"'r7' needs KV for 41 tokens \(30 of the prompt, 12 new\)"):
        scheduler.schedule(CountingSpace(num_blocks=10, block_size=4), 0.0)
    assert scheduler.num_waiting == 0


def test_waiting_requests_can_be_withdrawn() -> None:
    scheduler, space = ContinuousScheduler(1, 64), CountingSpace(100)
    sequences = [make_sequence(index, 3, 3) for index in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    scheduler.finish(sequences[1])
    assert scheduler.num_waiting == 2
    assert _given(scheduler.schedule(space, 0.0)) == [(0, 3)]
    _end(scheduler, space, sequences[0])
    assert _given(scheduler.schedule(space, 0.0)) == [(2, 3)]


def test_cost_of_a_step_does_not_depend_on_what_waits() -> None:
    """Counted in calls, which a busy machine does not change."""

    def calls(num_waiting: int) -> int:
        scheduler, space = ContinuousScheduler(8, 4096), CountingSpace(10**6)
        for index in range(8 + num_waiting):
            scheduler.add(make_sequence(index, 4, 100))
        _advance(scheduler.schedule(space, 0.0))
        count = 0

        def tally(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tally)
        try:
            plan = scheduler.schedule(space, 0.0)
        finally:
            sys.setprofile(None)
        assert plan.entries == [Scheduled(entry.sequence, 1) for entry in plan.entries]
        return count

    assert calls(5000) == calls(5)
