"""The host work of one step with 256 running and 10,000 waiting; the aim is under 1 ms, packing included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from infermix.engine.packing import PackEntry, pack
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
