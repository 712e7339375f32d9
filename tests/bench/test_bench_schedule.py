"""Scheduler and block pool with 256 running and 10,000 waiting: the aim is well under 1 ms a step."""

from __future__ import annotations

from typing import Any

from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix_reference.kv_paged import PagedLayout
from infermix_reference.scheduler_continuous import ContinuousScheduler


def test_schedule_256_running_10000_waiting(benchmark: Any) -> None:
    layout = PagedLayout(16)
    space = layout.space(layout.shape((KVGroup((0,), 1, 1, 1),), KVBudget(256, 4096, 2)))
    scheduler = ContinuousScheduler(256, 8192)
    sampling = SamplingParams(max_new_tokens=4000)
    for index in range(10_256):
        request = Request(request_id=str(index), prompt_ids=(1,) * 32, sampling=sampling)
        scheduler.add(Sequence(index, request, [1] * 32, 32))

    def step() -> None:
        for entry in scheduler.schedule(space, 0.0).entries:
            entry.sequence.num_computed += entry.num_new_tokens
            entry.sequence.num_inflight += 1

    step()
    assert (scheduler.num_running, scheduler.num_waiting) == (256, 10_000)
    benchmark.pedantic(step, rounds=200, iterations=1)
