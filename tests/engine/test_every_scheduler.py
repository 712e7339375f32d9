"""Schedulers change when tokens are computed, never which: the same greedy tokens under little KV, one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.request import Request, SamplingParams

Build = Callable[..., Any]
BYTES_PER_TOKEN = 2 * 2 * (16 + 16) * 4
NAMES = sorted(each.component.name for each in load_catalogue().all(Role.SCHEDULER))
OPTIONS: dict[str, dict[str, Any]] = {
    "static": {"batch_size": 3},
    "dynamic": {"batch_size": 3, "max_wait_s": 0.01},
    "continuous": {"max_num_batched_tokens": 20},
    "chunked_prefill": {"max_num_batched_tokens": 9, "max_chunk_tokens": 4},
    "priority": {"max_num_batched_tokens": 11, "chunked": True},
    "shortest_first": {"length": "predicted", "max_num_batched_tokens": 20},
    "fair_share": {"max_num_batched_tokens": 20},
    "class_budgets": {"budgets": {"a": 3}, "default_budget": 7, "max_num_batched_tokens": 12},
    "slo_aware": {"tpot_s": 1e-4, "max_num_batched_tokens": 16},
}


def requests() -> list[Request]:
    rng = random.Random(0)
    return [
        Request(
            request_id=str(index),
            prompt_ids=tuple(rng.randrange(6, 96) for _ in range(length)),
            sampling=SamplingParams(max_new_tokens=10, ignore_eos=True),
            priority=index % 3,
            category="ab"[index % 2],
        )
        for index, length in enumerate((1, 17, 33, 5, 40, 36))
    ]


def generate(engine: Any) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests()}
    for request in requests():
        engine.submit(request)
    for _ in range(100_000):
        if not engine.has_work:
            return tokens
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    raise AssertionError("the engine did not finish")


@pytest.fixture
def alone(build_engine: Build) -> dict[str, list[int]]:
    engine = build_engine({"attention": "eager", "kv": "dense", "scheduler": ("static", {"batch_size": 1})})
    return generate(engine)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_do_not_depend_on_the_scheduler(build_engine: Build, alone: dict[str, list[int]], name: str) -> None:
    parts = {"kv": ("paged", {"block_size": 4}), "scheduler": (name, OPTIONS.get(name, {}))}
    engine = build_engine(parts, kv_memory_bytes=BYTES_PER_TOKEN * 134)
    assert generate(engine) == alone
    if name in ("continuous", "priority", "fair_share"):
        assert engine.report().counters["preemptions"] > 0, "there was KV enough, so this shows little"
