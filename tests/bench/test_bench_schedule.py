"""The host work of one step; the aim is under 1 ms.

With packing 256 run and 10,000 wait; every registered scheduler alone has 512 running and 100,000 waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from infermix.engine.packing import PackEntry, pack
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix_reference.kv_paged import PagedLayout
from infermix_reference.scheduler_continuous import ContinuousScheduler

NUM_RUNNING, PROMPT = 256, 512


def busy_step(num_waiting: int, packed: bool) -> Callable[[], None]:
    """One decode step of `NUM_RUNNING` sequences of 512 tokens and more, in blocks of 16."""
    layout = PagedLayout(16)
    shape = layout.shape((KVGroup((0,), 1, 1, 1),), KVBudget(NUM_RUNNING, 4096, 2))
    space = layout.space(shape)
    scheduler = ContinuousScheduler(NUM_RUNNING, PROMPT * NUM_RUNNING)
    sampling = SamplingParams(max_new_tokens=3000)
    for index in range(NUM_RUNNING + num_waiting):
        request = Request(request_id=str(index), prompt_ids=(1,) * PROMPT, sampling=sampling)
        scheduler.add(Sequence(index, request, [1] * PROMPT, PROMPT))

    def step() -> None:
        plan = scheduler.schedule(space, 0.0)
        if packed:
            pack(
                [PackEntry(e.sequence.seq_id, (1,), e.sequence.num_computed) for e in plan.entries],
                space,
                shape,
                "cpu",
            )
        for entry in plan.entries:
            entry.sequence.num_computed += entry.num_new_tokens
            entry.sequence.num_inflight += 1

    for entry in scheduler.schedule(space, 0.0).entries:
        entry.sequence.num_computed += entry.num_new_tokens
        entry.sequence.num_inflight += 1
    assert (scheduler.num_running, scheduler.num_waiting) == (NUM_RUNNING, num_waiting)
    return step


@pytest.mark.parametrize("packed", [False, True], ids=["schedule", "schedule+pack"])
@pytest.mark.parametrize("num_waiting", [0, 10_000])
def test_host_work_of_a_step(benchmark: Any, num_waiting: int, packed: bool) -> None:
    benchmark.pedantic(busy_step(num_waiting, packed), rounds=300, iterations=1, warmup_rounds=20)


def crowded_step(name: str, num_running: int, num_waiting: int) -> Callable[[], None]:
    """One decode step of any registered scheduler, with prompts of every length, class and tenant behind it."""
    layout = PagedLayout(16)
    space = layout.space(layout.shape((KVGroup((0,), 1, 1, 1),), KVBudget(num_running, 4096, 2)))
    component = SCHEDULERS[name]
    known = {field.name for field in msgspec.structs.fields(component.options)}
    given = {"batch_size": num_running, "max_num_seqs": num_running, "max_num_batched_tokens": 1 << 20}
    given |= {"default_budget": 1 << 20, "ttft_s": 1e6}
    options = {key: value for key, value in given.items() if key in known}
    scheduler = component.build(msgspec.convert(options, component.options), num_running)
    sampling = SamplingParams(max_new_tokens=3000)
    for index in range(num_running + num_waiting):
        request = Request(
            request_id=str(index),
            prompt_ids=(1,) * 64,
            sampling=sampling,
            priority=index % 5,
            tenant=str(index % 1000),
        )
        scheduler.add(Sequence(index, request, [1] * 64, 64))

    def step() -> None:
        plan = scheduler.schedule(space, 0.0)
        for entry in plan.entries:
            entry.sequence.num_computed += entry.num_new_tokens
            entry.sequence.num_inflight += 1

    step()
    assert (scheduler.num_running, scheduler.num_waiting) == (num_running, num_waiting)
    return step


SCHEDULERS = {each.component.name: each.component for each in load_catalogue().all(Role.SCHEDULER)}


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_step_of_512_with_100_000_waiting(benchmark: Any, name: str) -> None:
    benchmark.pedantic(crowded_step(name, 512, 100_000), rounds=200, iterations=1, warmup_rounds=20)
