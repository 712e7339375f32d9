"""Prefill and mixed steps replayed from CUDA graphs: the tokens of eager steps, no host sync, no allocation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from infermix.engine import capture
from infermix.plugins import Catalogue
from infermix.roles.component import Choice, Role
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix.roles.scheduler import Plan, Scheduled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
Build = Callable[..., Any]
PARTS = {"attention": "triton", "kv": ("paged", {"block_size": 16})}
CHUNKED = ("continuous", {"max_num_batched_tokens": 48, "chunked": True})


@pytest.fixture
def build(build_engine: Build) -> Build:
    def of(parts: dict[str, Any] | None = None, most: int | None = 64, **given: Any) -> Any:
        engine = {"mixed_graph_tokens": most, **given.pop("engine", {})}
        wanted = {**PARTS, **(parts or {})}
        return build_engine(wanted, engine, device="cuda", max_num_seqs=6, kv_memory_bytes=1 << 26, **given)

    return of


@pytest.fixture
def strict_sync() -> Iterator[Callable[[], None]]:
    """Any wait of the host for the device raises from the call on."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def generate(engine: Any, **sampling: Any) -> dict[str, list[int]]:
    rng = random.Random(0)
    tokens: dict[str, list[int]] = {}
    for number in range(14):
        prompt = tuple(rng.randrange(6, 96) for _ in range(rng.randrange(1, 60)))
        params = SamplingParams(max_new_tokens=rng.randrange(4, 40), seed=number, **sampling)
        engine.submit(Request(request_id=str(number), prompt_ids=prompt, sampling=params))
        tokens[str(number)] = []
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0, "top_k": 20}, {"repetition_penalty": 1.2, "min_new_tokens": 3}],
    ids=["greedy", "sampled", "penalised"],
)
@pytest.mark.parametrize("scheduler", ["continuous", CHUNKED], ids=["whole", "chunked"])
def test_tokens_are_the_same_with_mixed_graphs_and_without(
    build: Build, scheduler: Any, sampling: dict[str, Any]
) -> None:
    captured = build({"scheduler": scheduler})
    report = captured.report()
    assert report.graphs["mixed"]["tokens"] == [16, 32, 64]
    captures = report.counters["graph_captures"]
    tokens = generate(captured, **sampling)
    counters = captured.report().counters
    assert counters["mixed_graph_steps"] > 0
    assert counters["graph_captures"] == captures
    assert tokens == generate(build({"scheduler": scheduler}, 0), **sampling)
    assert tokens == generate(build({"scheduler": scheduler}, engine={"overlap": "off"}), **sampling)


def test_chunked_steps_never_run_eagerly(build: Build) -> None:
    engine = build({"scheduler": CHUNKED})
    generate(engine)
    counters = engine.report().counters
    assert counters["eager_steps"] == 0
    assert counters["graph_steps"] > counters["mixed_graph_steps"] > 0


def test_reasons_are_reported(build: Build) -> None:
    assert build(most=0).report().graphs["mixed"] == {"captured": 0, "reason": "switched off by the experiment"}
    assert "fixed row" in build({"kv": "dense"}).report().graphs["mixed"]["reason"]
    assert "no graph:mixed" in build({"attention": "sdpa"}).report().graphs["mixed"]["reason"]


def test_kernels_pick_the_tokens(build: Build, catalogue: Catalogue) -> None:
    registered = catalogue.find(Role.TRANSFORM, "triton_sampling")
    engine = build(transforms=(Choice(registered, registered.component.options()),))
    for sampling in ({}, {"temperature": 1.0, "top_p": 0.9}):
        assert generate(engine, **sampling) == generate(build(), **sampling)


def test_a_replay_neither_waits_nor_allocates(build: Build, strict_sync: Callable[[], None]) -> None:
    engine = build()
    runner, entries = engine._runner, []
    for number, length in enumerate((20, 3, 9)):
        tokens = list(range(6, 6 + length))
        request = Request(request_id=str(number), prompt_ids=tuple(tokens), sampling=SamplingParams())
        entries.append(Scheduled(Sequence(number, request, tokens, length, lane=number), length))
        assert engine._space.reserve(number, length)
    with torch.inference_mode():
        first = runner.forward(Plan(entries)).logits.clone()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        strict_sync()
        for _ in range(5):
            forward = runner.forward(Plan(entries))
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(forward.logits, first)
    assert runner.num_mixed_graph_steps == 6


def test_larger_steps_are_captured_while_they_wait_for_the_host(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model always does, so that the scheduler's largest step is the limit."""
    scheduler = ("continuous", {"max_num_batched_tokens": 96, "chunked": True})
    eager = build({"scheduler": scheduler}, most=0)
    expected = generate(eager)
    monkeypatch.setattr(capture, "worthwhile_tokens", lambda num_parameters: 32)
    engine = build({"scheduler": scheduler}, most=None)
    mixed = engine.report().graphs["mixed"]
    assert mixed["tokens"] == [16, 32, 64, 96]
    assert mixed["host_bound"]["tokens"] == 96
    assert set(mixed["host_bound"]["step_ms"]) == {"64", "96"}
    assert mixed["host_bound"]["launch_ms"] > 0
    assert generate(engine) == expected
