"""Swapping sequences to host memory: who owns what, who comes back when, and the copies."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infermix.compose import compose
from infermix.errors import Unsupported, UserError
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.facts import StateTensor
from infermix.roles.kv_space import BlockMoves, KVBudget, KVGroup, KVShape, LayerState
from infermix.spec.load import load_experiment
from infermix.toolkit.block_rows import BlockRows, runs
from infermix.toolkit.block_swapper import BlockSwapper
from infermix.toolkit.conformance import check_kv_layout, check_scheduler, run_to_end
from infermix.toolkit.conformance.kv_swap import check_kv_swap
from infermix.toolkit.conformance.scheduler import CountingSpace, make_sequence
from infermix.toolkit.host_blocks import HostBlocks, with_host_blocks
from infermix.toolkit.paged_space import PagedSpace
from infermix.toolkit.pool_store import PagedStore
from infermix_kv.state import StateLayout
from infermix_reference.kv_dense import DenseLayout
from infermix_reference.kv_paged import PagedLayout
from infermix_reference.scheduler_continuous import ContinuousScheduler

SMALL = (KVGroup((0, 1), 2, 4, 4),)
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 25)), min_size=1, max_size=14)


class WatchedSpace(PagedSpace):
    """The real space, with what the scheduler checks look at, and every promise about blocks checked at each move."""

    @property
    def held(self) -> dict[int, int]:
        return self._lengths

    @property
    def host(self) -> HostBlocks:
        return self._host

    def swap_out(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        free, kept = self._pool.num_free, len(self.block_table(seq_id))
        moves = super().swap_out(seq_id, num_tokens)
        if moves is None:
            assert self._pool.num_free == free
            return None
        assert self._pool.num_free == free + kept
        assert len(set(moves.host_blocks[0])) == len(moves.device_blocks[0]) == -(-num_tokens // self._block_size)
        return moves

    def swap_in(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        moves = super().swap_in(seq_id, num_tokens)
        if moves is not None:
            assert set(moves.device_blocks[0]) <= set(self.block_table(seq_id))
        return moves


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS,
    spare=st.integers(0, 30),
    host=st.sampled_from([0, 1, 5, 20, 1000]),
    block_size=st.integers(1, 9),
    budget=st.integers(1, 64),
    chunked=st.booleans(),
    swap=st.booleans(),
    max_num_seqs=st.integers(1, 6),
    lag=st.integers(0, 1),
    arrive_every=st.integers(0, 4),
)
def test_every_request_ends_in_any_space_that_fits_the_largest(
    lengths: list[tuple[int, int]],
    spare: int,
    host: int,
    block_size: int,
    budget: int,
    chunked: bool,
    swap: bool,
    max_num_seqs: int,
    lag: int,
    arrive_every: int,
) -> None:
    largest = max(prompt + output for prompt, output in lengths)
    num_blocks = -(-largest // block_size) + spare
    shape = KVShape(SMALL, num_blocks, block_size, max_num_seqs, num_blocks * block_size, 0, 0.0, host_blocks=(host,))
    space: Any = WatchedSpace(shape)
    scheduler = ContinuousScheduler(max_num_seqs, budget, chunked, swap=swap)
    run_to_end(scheduler, space, lengths, max_num_seqs=max_num_seqs, lag=lag, arrive_every=arrive_every)
    assert space._pool.num_used == 0


def _advance(plan: Any) -> None:
    for entry in plan.entries:
        entry.sequence.num_computed += entry.num_new_tokens
        if not entry.sequence.num_uncomputed:
            entry.sequence.tokens.append(1)


def _pressed() -> tuple[ContinuousScheduler, CountingSpace, list[Any]]:
    """Three prompts of 4 tokens in 4 blocks of 4: two of them find no block for their next token."""
    scheduler, space = ContinuousScheduler(4, 64, swap=True), CountingSpace(4, num_host_blocks=4)
    sequences = [make_sequence(index, 4, 12) for index in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    return scheduler, space, sequences


def test_the_last_admitted_is_swapped_out_and_resumed_before_anyone_new() -> None:
    scheduler, space, (first, second, third) = _pressed()
    _advance(scheduler.schedule(space, 0.0))
    plan = scheduler.schedule(space, 0.0)
    assert plan.swapped_out == [third]
    assert [entry.sequence for entry in plan.entries] == [first, second]
    assert (third.num_computed, scheduler.num_waiting, scheduler.num_running) == (4, 1, 2)
    assert not plan.preempted
    _advance(plan)
    late = make_sequence(9, 1, 1)
    scheduler.add(late)
    plan = scheduler.schedule(space, 0.0)
    assert (plan.swapped_in, scheduler.num_waiting) == ([], 2), "a new request passed the swapped one"
    _advance(plan)
    space.release(second.seq_id)
    scheduler.finish(second)
    plan = scheduler.schedule(space, 0.0)
    assert plan.swapped_in == [third]
    assert [entry.sequence for entry in plan.entries] == [first], "the copy overlaps with one step"
    _advance(plan)
    assert third in [entry.sequence for entry in scheduler.schedule(space, 0.0).entries]


def test_what_comes_back_alone_runs_at_once() -> None:
    scheduler, space, (first, second, third) = _pressed()
    _advance(scheduler.schedule(space, 0.0))
    _advance(scheduler.schedule(space, 0.0))
    for seq in (first, second):
        space.release(seq.seq_id)
        scheduler.finish(seq)
    plan = scheduler.schedule(space, 0.0)
    assert plan.swapped_in == [entry.sequence for entry in plan.entries] == [third]


def test_a_full_host_means_recomputation() -> None:
    scheduler, space, sequences = _pressed()
    space.host = HostBlocks([0], 4, [-1])
    _advance(scheduler.schedule(space, 0.0))
    plan = scheduler.schedule(space, 0.0)
    assert plan.preempted == [sequences[2]]
    assert not plan.moves
    assert sequences[2].num_computed == 0


def test_an_ended_request_gives_its_host_blocks_back() -> None:
    scheduler, space, sequences = _pressed()
    _advance(scheduler.schedule(space, 0.0))
    scheduler.schedule(space, 0.0)
    assert space.host.num_used == 1
    space.release(2)
    scheduler.finish(sequences[2])
    assert (space.host.num_used, scheduler.num_waiting) == (0, 0)


@pytest.mark.parametrize("groups", [(KVGroup((1,), 1, 4, 4),), ()], ids=["hybrid", "recurrent"])
def test_rows_of_states_move_with_their_blocks(groups: Any) -> None:
    states = (LayerState(0, (StateTensor("conv", (3, 2), None), StateTensor("ssm", (5,), "float32"))),)
    layout = StateLayout(4, snapshots=2)
    shape = layout.shape(groups, KVBudget(4, 40, 4, states=states))
    assert layout.store(shape, "cpu", torch.float32).allocated_bytes() == shape.bytes
    check_kv_swap(layout, shape)


def test_a_table_with_repeats_and_the_sink_moves_each_block_once() -> None:
    class Ring(CountingSpace):
        def block_table(self, seq_id: int, table: int = 0) -> list[int]:
            return [9, 9, 0, 1, 0, 1] if table else [4, 5, 6, 7, 8, 3]

    space, host = Ring(10), HostBlocks([10, 10], 4, [9, 9])
    assert space.reserve(0, 24)
    moves = host.swap_out(space, 0, 20)
    assert moves is not None
    assert moves.device_blocks == ((4, 5, 6, 7, 8), (0, 1))
    assert moves.num_blocks == 7


@pytest.mark.parametrize("layout", [PagedLayout(4), DenseLayout()])
def test_host_memory_is_counted_in_blocks(layout: Any) -> None:
    shape = layout.shape(SMALL, KVBudget(3, 16, 4))
    block_bytes = shape.bytes // (shape.num_blocks + 1)
    assert with_host_blocks(shape, 2 * block_bytes + 1).host_blocks == (2,)
    assert with_host_blocks(shape, 10**9).host_blocks == (3 * shape.blocks_per_seq,)
    with pytest.raises(UserError, match=f"at least {block_bytes} bytes are needed"):
        with_host_blocks(shape, block_bytes - 1)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([], []),
        ([3], [(0, 3, 1)]),
        ([3, 4, 5, 1, 2, 9], [(0, 3, 3), (3, 1, 2), (5, 9, 1)]),
        ([2, 1], [(0, 2, 1), (1, 1, 1)]),
    ],
)
def test_runs_of_consecutive_blocks(blocks: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert runs(blocks) == expected


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.int8, torch.float16), (torch.bfloat16,)])
def test_rows_hold_every_tensor_of_a_block(dtypes: tuple[torch.dtype, ...]) -> None:
    tensors = [torch.randint(0, 100, (6, 3, dim)).to(dtype) for dim, dtype in zip((4, 1), dtypes, strict=False)]
    before = [tensor.clone() for tensor in tensors]
    rows = BlockRows(tensors)
    assert rows.block_bytes == sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)
    out = torch.empty((2, rows.width), dtype=rows.unit)
    rows.gather(torch.tensor([4, 1]), out)
    rows.scatter(torch.tensor([0, 5]), out)
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(new[[0, 5]], old[[4, 1]])
        assert torch.equal(new[1:5], old[1:5])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3), (3, 1, 0), (2,)])
def test_tensors_of_one_allocation_move_together(order: tuple[int, ...]) -> None:
    """Evenly spaced or not, in any order, the rows are those of the tensors as they are given."""
    slab, other = torch.arange(4 * 5 * 6.0).view(4, 5, 2, 3), -torch.arange(5 * 2.0).view(5, 2)
    tensors = [*(slab[index] for index in order), other]
    rows = BlockRows(tensors)
    blocks = torch.tensor([4, 0, 2])
    out = torch.empty((3, rows.width), dtype=rows.unit)
    rows.gather(blocks, out)
    expected = torch.cat([tensor[blocks].flatten(1).view(rows.unit) for tensor in tensors], dim=1)
    assert torch.equal(out, expected)
    before = slab.clone()
    rows.scatter(torch.tensor([1, 3, 4]), out)
    for index in range(4):
        moved = before[index].clone()
        moved[[1, 3, 4]] = before[index][blocks]
        assert torch.equal(slab[index], moved if index in order else before[index])


def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(Unsupported, match="has gaps"):
        BlockRows([torch.zeros(4, 8)[:, :4]])


def test_a_store_that_hides_its_blocks_is_refused() -> None:
    shape = PagedLayout(4).shape(SMALL, KVBudget(1, 8, 4))
    store: Any = object()
    with pytest.raises(Unsupported, match="block_tensors"):
        BlockSwapper(store, shape, torch.device("cpu"), lambda: 0)


def test_counters_say_what_moved() -> None:
    layout = PagedLayout(4)
    shape = with_host_blocks(layout.shape(SMALL, KVBudget(2, 16, 4)), 10**6)
    store, space = layout.store(shape, "cpu", torch.float32), layout.space(shape)
    ticks = itertools.count(step=1_000_000_000)
    swapper = BlockSwapper(store, shape, torch.device("cpu"), lambda: next(ticks))
    assert space.reserve(0, 9)
    for moves in (space.swap_out(0, 9), space.swap_in(0, 10)):
        assert moves is not None
        swapper.execute([moves])
    figures = swapper.counters()
    assert figures["swap_out_bytes"] == figures["swap_in_bytes"] == 3 * 4 * shape.bytes_per_token
    assert (figures["swaps_out"], figures["swaps_in"]) == (1, 1)
    assert figures["swap_out_bytes_per_s"] == figures["swap_out_bytes"]
    assert figures["swap_stall_s"] == 2.0
    swapper.reset()
    assert not any(swapper.counters().values())


class _HalfStore(PagedStore):
    def block_tensors(self, table: int = 0) -> list[torch.Tensor]:
        return super().block_tensors(table)[::2]


class _OtherStore(PagedStore):
    """Answers with copies: nothing that is written there reaches the pools."""

    def block_tensors(self, table: int = 0) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in super().block_tensors(table)]


class _HoardingSpace(PagedSpace):
    def release(self, seq_id: int) -> None:
        if seq_id in self._tables:
            super().release(seq_id)


class _ShiftedSpace(PagedSpace):
    def swap_in(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        moves = super().swap_in(seq_id, num_tokens)
        return moves and replace(moves, host_blocks=(moves.host_blocks[0][::-1],))


@pytest.mark.parametrize(
    "halves",
    [(PagedSpace, _HalfStore), (PagedSpace, _OtherStore), (_HoardingSpace, PagedStore), (_ShiftedSpace, PagedStore)],
    ids=["tensors missing", "tensors copied", "host blocks kept", "blocks in another order"],
)
def test_a_layout_that_swaps_wrongly_is_caught(halves: tuple[Any, Any]) -> None:
    class Broken(PagedLayout):
        def space(self, shape: Any) -> Any:
            return halves[0](shape)

        def store(self, shape: Any, device: Any, dtype: Any) -> Any:
            return halves[1](shape, device, dtype)

    component = load_catalogue().find(Role.KV, "paged").component
    with pytest.raises(AssertionError):
        check_kv_layout(replace(component, build=lambda options, context: Broken(4)))


class _Forgetful(ContinuousScheduler):
    """Swaps out and forgets to say so."""

    def schedule(self, space: Any, now_s: float) -> Any:
        plan = super().schedule(space, now_s)
        plan.moves = []
        return plan


class _Impatient(ContinuousScheduler):
    """Computes a swapped sequence from its start as well."""

    def _preempt(self, victim: Any, plan: Any, space: Any) -> None:
        super()._preempt(victim, plan, space)
        victim.num_computed = 0


@pytest.mark.parametrize("broken", [_Forgetful, _Impatient])
def test_a_scheduler_that_swaps_wrongly_is_caught(broken: Any) -> None:
    component = load_catalogue().find(Role.SCHEDULER, "continuous").component
    mutant = replace(component, build=lambda options, context: broken(context, 64, swap=True))
    with pytest.raises(AssertionError):
        check_scheduler(mutant)


@pytest.mark.parametrize(
    ("limits", "kv", "reason"),
    [
        ("{kv_swap_bytes: 1000000000}", "paged", None),
        ("{}", "paged", "needs limits:kv_swap_bytes, which this experiment does not set"),
        ("{kv_swap_bytes: 1000000000}", "concat", "needs kv:swap, which kv 'concat' does not provide"),
    ],
)
def test_a_mix_that_cannot_swap_says_why(tmp_path: Path, limits: str, kv: str, reason: str | None) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        "model: {source: 'shape:smollm2-135m', weights: dummy}\ndevice: cpu\nworkload: synthetic\n"
        f"limits: {limits}\nparts: {{kv: {kv}, scheduler: {{use: continuous, preemption: swap}}}}\n"
    )
    (plan,) = compose(load_experiment(str(file)), load_catalogue())
    assert plan.reasons == (() if reason is None else (f"scheduler 'continuous' {reason}",))
    assert (plan.sequences_that_fit or 0) > 0 or kv == "concat"
