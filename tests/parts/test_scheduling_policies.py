"""Properties of every registered scheduler over random loads, and what each policy promises."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.roles.request import FinishReason, Sequence
from infermix.roles.scheduler import Plan
from infermix.toolkit.conformance import run_to_end
from infermix.toolkit.conformance.scheduler import CountingSpace, make_sequence
from infermix_reference.kv_paged import PagedLayout
from infermix_schedulers.plugin import ClassBudgetsOptions

SCHEDULERS = {each.component.name: each.component for each in load_catalogue().all(Role.SCHEDULER)}
REQUEST = st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(-2, 3), st.sampled_from(["", "a", "b"]))
#: What makes a policy's own rules matter in such small loads.
OPTIONS: dict[str, dict[str, Any]] = {
    "static": {"batch_size": 3},
    "dynamic": {"batch_size": 3, "max_wait_s": 0.03},
    "priority": {"ageing_s": 0.02},
    "shortest_first": {"ageing_s_per_token": 0.001},
    "fair_share": {"weights": {"a": 2.5}},
    "class_budgets": {"budgets": {"a": 3, "b": 9}, "default_budget": 5},
    "slo_aware": {"tpot_s": 0.0125, "ttft_s": 0.05},
}


def build(name: str, most: int = 4, **options: Any) -> Any:
    component = SCHEDULERS[name]
    known = {field.name for field in msgspec.structs.fields(component.options)}
    wanted = {key: value for key, value in {**OPTIONS.get(name, {}), **options}.items() if key in known}
    return component.build(msgspec.convert(wanted, component.options), most)


def sequence(seq_id: int, prompt: int = 4, output: int = 4, **changes: Any) -> Sequence:
    made = make_sequence(seq_id, prompt, output)
    made.request = replace(made.request, **changes)
    return made


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=10),
    spare=st.integers(0, 20),
    block_size=st.integers(1, 9),
    host_blocks=st.sampled_from([0, 5, 200]),
    budget=st.integers(1, 48),
    chunked=st.booleans(),
    watermark=st.sampled_from([0.0, 0.3, 0.95]),
    most=st.integers(1, 5),
    recompute=st.booleans(),
    lag=st.integers(0, 1),
    arrive_every=st.integers(0, 3),
)
def test_every_request_ends_in_any_space_that_fits_the_largest(
    name: str, requests: list[Any], spare: int, block_size: int, host_blocks: int, budget: int, chunked: bool,
    watermark: float, most: int, recompute: bool, lag: int, arrive_every: int,
) -> None:  # fmt: skip
    largest = max(prompt + output for prompt, output, *_ in requests)
    hosts = 0 if recompute else host_blocks
    space = CountingSpace(-(-largest // block_size) + spare, block_size, recompute=recompute, num_host_blocks=hosts)
    preemption = "swap" if hosts else "recompute"
    scheduler = build(
        name, most, max_num_batched_tokens=budget, chunked=chunked, watermark=watermark, preemption=preemption
    )
    original, labels = scheduler.add, iter(requests)

    def add(seq: Sequence) -> None:
        _, _, priority, category = next(labels)
        seq.request = replace(seq.request, priority=priority, category=category)
        original(seq)

    scheduler.add = add
    lengths = [(prompt, output) for prompt, output, *_ in requests]
    run_to_end(scheduler, space, lengths, max_num_seqs=most, lag=lag, arrive_every=arrive_every)


class Server:
    """Serves without a model: a step takes `step_s`; writes down who was let in when."""

    def __init__(self, scheduler: Any, space: Any = None, step_s: float = 1.0) -> None:
        self.scheduler, self.step_s = scheduler, step_s
        self.space = space or CountingSpace(10**6)
        self.now_s = 0.0
        self.first: dict[int, float] = {}
        self.order: list[int] = []

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.scheduler.add(seq)

    def step(self, step_s: Callable[[Plan], float] | None = None) -> Plan:
        plan: Plan = self.scheduler.schedule(self.space, self.now_s)
        for entry in plan.entries:
            if entry.sequence.seq_id not in self.first:
                self.first[entry.sequence.seq_id] = self.now_s
                self.order.append(entry.sequence.seq_id)
        taken = step_s(plan) if step_s else self.step_s
        self.now_s += taken
        for entry in plan.entries:
            self._advance(entry.sequence, entry.num_new_tokens)
        if hasattr(self.scheduler, "observe"):
            self.scheduler.observe(taken, plan)
        return plan

    def _advance(self, seq: Sequence, new: int) -> None:
        seq.num_computed += new
        if seq.num_uncomputed:
            return
        seq.tokens.append(1)
        if seq.exhausted:
            seq.finish_reason = FinishReason.LENGTH
            self.space.release(seq.seq_id)
            self.scheduler.finish(seq)


def test_dynamic_waits_for_a_full_batch_or_its_time() -> None:
    server = Server(build("dynamic", batch_size=3, max_wait_s=2.5), step_s=1.0)
    server.add(sequence(0, output=1))
    plan = server.step()
    assert (plan.entries, plan.wake_s) == ([], 2.5)
    server.add(sequence(1, output=1))
    assert server.step().wake_s == 2.5
    assert server.step().wake_s == 2.5
    assert [entry.sequence.seq_id for entry in server.step().entries] == [0, 1], "the first has waited 2.5 s"
    server.add(*(sequence(index, output=1) for index in (2, 3, 4)))
    assert [entry.sequence.seq_id for entry in server.step().entries] == [2, 3, 4], "a full batch does not wait"


def test_chunked_prefill_limits_one_prompt_and_the_step() -> None:
    server = Server(build("chunked_prefill", max_num_batched_tokens=10, max_chunk_tokens=6))
    server.add(sequence(0, 2, 30), sequence(1, 13), sequence(2, 9))
    given_tokens = [[entry.num_new_tokens for entry in server.step().entries] for _ in range(3)]
    assert given_tokens == [[2, 6, 2], [1, 6, 3], [1, 1, 4]]


def test_priority_overtaking_is_bounded_by_the_ageing() -> None:
    """Overload of urgent requests for ever: the bound says who may overtake, and the lowest class still gets in."""
    ageing_s, low_at, classes = 7.0, 5, 3
    server = Server(build("priority", most=1, ageing_s=ageing_s))
    arrived = {}
    for index in range(120):  # one arrives each second, one takes two seconds: half of them must wait
        priority = classes if index == low_at else index % classes
        arrived[index] = (server.now_s, priority)
        server.add(sequence(index, 1, 2, priority=priority))
        server.step()
    for place, one in enumerate(server.order):
        for earlier in server.order[:place]:
            (at_one, class_one), (at_earlier, class_earlier) = arrived[one], arrived[earlier]
            assert at_earlier <= at_one + ageing_s * max(0, class_one - class_earlier)
    overtakers = [index for index, (at, _) in arrived.items() if at < low_at + ageing_s * classes]
    assert server.first[low_at] - low_at <= 2 * len(overtakers), "waits only for what may overtake it"
    assert server.first[low_at] > 2 * low_at + 2, "and it was overtaken, or the test shows nothing"


def test_priority_preempts_the_least_urgent() -> None:
    server = Server(build("priority", most=4, max_num_batched_tokens=64), CountingSpace(3, 4))
    server.add(sequence(0, 3, 9, priority=5), sequence(1, 4, 4, priority=0), sequence(2, 4, 4, priority=1))
    server.step()
    assert [seq.seq_id for seq in server.step().preempted] == [0]


def test_shortest_first_orders_by_length_and_ages() -> None:
    server = Server(build("shortest_first", most=1, length="prompt", ageing_s_per_token=1.0))
    server.add(sequence(0, 9, 1), sequence(1, 30, 1), sequence(2, 3, 1))
    server.step()
    server.now_s = 20.0
    server.add(sequence(3, 5, 1), sequence(4, 12, 1))
    for _ in range(4):
        server.step()
    assert server.order == [2, 0, 3, 1, 4], "30 tokens that waited 20 s go before 12 new ones, not before 5"


@pytest.mark.parametrize(("weights", "share"), [({}, 0.5), ({"small": 3.0}, 0.75)])
def test_fair_share_follows_the_weights_whatever_the_load(weights: dict[str, float], share: float) -> None:
    """One tenant queues ten times as much as the other; what both get while both wait goes by weight."""
    server = Server(build("fair_share", most=4, weights=weights, output_weight=1.0))
    server.add(*(sequence(index, 5, 5, tenant="large") for index in range(400)))
    server.add(*(sequence(400 + index, 5, 5, tenant="small") for index in range(150)))
    for _ in range(160):
        server.step()
        served = server.scheduler._queue._served
        assert abs(served["large"] - served["small"]) <= 5 + 4 * 5, "one prompt, and what four running ones produce"
    small = sum(index >= 400 for index in server.order)
    assert small < 150, "the small tenant still waits"
    assert small / len(server.order) == pytest.approx(share, abs=0.05)


def test_fair_share_gives_no_credit_for_idleness() -> None:
    server = Server(build("fair_share", most=1, weights={}, output_weight=1.0))
    server.add(*(sequence(index, 5, 1, tenant="busy") for index in range(60)))
    for _ in range(30):
        server.step()
    server.add(*(sequence(100 + index, 5, 1, tenant="back") for index in range(20)))
    for _ in range(20):
        server.step()
    since = server.order[30:]
    assert sum(index >= 100 for index in since) == pytest.approx(10, abs=1)


def test_fair_share_forgets_withdrawn_requests() -> None:
    server = Server(build("fair_share", most=1))
    sequences = [sequence(index, 4, 1, tenant=f"t{index}") for index in range(4)]
    server.add(*sequences)
    server.step()
    for seq in sequences[1:3]:
        server.scheduler.finish(seq)
    assert server.scheduler.num_waiting == 1
    server.step()
    assert server.order == [0, 3]


def test_the_class_of_everything_else_has_one_budget() -> None:
    with pytest.raises(ValueError, match="'' stands for requests of no category, whose budget is default_budget"):
        ClassBudgetsOptions(budgets={"": 8})


def test_class_budgets_bound_each_class_in_each_step() -> None:
    server = Server(build("class_budgets", most=8, budgets={"long": 8}, default_budget=20))
    server.add(sequence(0, 100, category="long"), sequence(1, 30), sequence(2, 6))
    plans = [{e.sequence.seq_id: e.num_new_tokens for e in server.step().entries} for _ in range(2)]
    assert plans == [{0: 8, 1: 20}, {0: 8, 1: 10, 2: 6}]


def _step_s(plan: Plan) -> float:
    context = sum(entry.sequence.num_computed for entry in plan.entries)
    return 0.004 + 0.001 * len(plan.entries) + 0.0002 * plan.num_new_tokens + 1e-6 * context


@pytest.mark.parametrize("tpot_s", [0.02, 0.05])
def test_slo_aware_fills_the_limit_and_keeps_it(tpot_s: float) -> None:
    server = Server(build("slo_aware", most=256, tpot_s=tpot_s, ttft_s=60.0, quantile=0.99))
    server.add(*(sequence(index, 40 + index % 7, 60) for index in range(400)))
    taken = []

    def measured(plan: Plan) -> float:
        taken.append(_step_s(plan))
        return taken[-1]

    for _ in range(400):
        server.step(measured)
    steady = sorted(taken[200:])
    assert steady[int(0.99 * len(steady))] <= 1.1 * tpot_s
    assert steady[len(steady) // 2] >= 0.6 * tpot_s, "the limit is used, not only kept"


def test_slo_aware_without_a_limit_to_speak_of_fills_the_budget() -> None:
    server = Server(build("slo_aware", most=256, max_num_batched_tokens=256, tpot_s=1e308, ttft_s=1e308))
    server.add(*(sequence(index, 40 + index % 7, 60) for index in range(400)))
    plans = [server.step(_step_s) for _ in range(100)]
    assert max(plan.num_new_tokens for plan in plans[50:]) == 256


def test_slo_aware_lets_in_first_who_can_still_make_it() -> None:
    server = Server(build("slo_aware", most=1, ttft_s=5.0))
    server.add(sequence(0, 4, 1), *(sequence(index, 4, 1) for index in (1, 2)))
    server.step()
    server.now_s = 10.0
    server.add(*(sequence(index, 4, 1) for index in range(10, 13)))
    for _ in range(5):
        server.step()
    assert server.order == [0, 10, 11, 12, 1, 2]


def test_slo_aware_does_not_starve_the_late() -> None:
    server = Server(build("slo_aware", most=1, ttft_s=0.5))
    server.add(sequence(0, 4, 1), sequence(1, 4, 1))
    for index in range(10, 40):
        server.add(sequence(index, 4, 1))
        server.step()
    assert server.order.index(1) <= 8


def test_whoever_is_refused_for_its_length_leaves_the_queue() -> None:
    for name in SCHEDULERS:
        scheduler = build(name, max_wait_s=0.0)
        scheduler.add(sequence(7, 30, 12))
        with pytest.raises(Exception, match=r"'r7' needs KV for 41 tokens"):
            scheduler.schedule(CountingSpace(num_blocks=10, block_size=4), 0.0)
        assert scheduler.num_waiting == 0


def calls_of_a_step(name: str, num_running: int, num_waiting: int) -> int:
    """Calls of one decode step, which a busy machine does not change."""
    scheduler = build(
        name, most=num_running, batch_size=num_running, max_num_batched_tokens=4096, default_budget=4096
    )
    layout = PagedLayout(16)
    space = layout.space(layout.shape((KVGroup((0,), 1, 1, 1),), KVBudget(num_running, 256, 2)))
    for index in range(num_running + num_waiting):
        scheduler.add(sequence(index, 4, 100, tenant=str(index % 4)))
    for entry in scheduler.schedule(space, 0.0).entries:
        entry.sequence.num_computed += entry.num_new_tokens
        entry.sequence.tokens.append(1)
    count = 0

    def tally(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tally)
    try:
        scheduler.schedule(space, 0.0)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_cost_of_a_step_does_not_grow_with_what_waits(name: str) -> None:
    assert calls_of_a_step(name, 8, 3000) <= calls_of_a_step(name, 8, 5) + 20


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_cost_of_a_running_sequence_is_a_few_calls(name: str) -> None:
    """512 running sequences in a millisecond leave 2 us for each: ten calls of Python."""
    few, many = (calls_of_a_step(name, num_running, 100) for num_running in (4, 68))
    assert many - few <= 64 * 10
