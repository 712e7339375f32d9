"""Preemption by swapping: the same greedy tokens under any pressure, and a record that shows the traffic."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from infermix.errors import UserError
from infermix.roles.request import Request, SamplingParams

Build = Callable[..., Any]
BYTES_PER_TOKEN = 2 * 2 * (16 + 16) * 4
SWAP = ("continuous", {"preemption": "swap"})


def requests(**sampling: Any) -> list[Request]:
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(6, 96) for _ in range(length)) for length in (1, 7, 16, 17, 33, 5, 48)]
    given = {"max_new_tokens": 12, "ignore_eos": True, **sampling}
    return [
        Request(request_id=str(i), prompt_ids=prompt, sampling=SamplingParams(**{**given, "seed": i}))
        for i, prompt in enumerate(prompts)
    ]


def generate(engine: Any, wanted: list[Request]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    for request in wanted:
        engine.submit(request)
    for _ in range(2000):
        if not engine.has_work:
            return tokens
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    raise AssertionError("the engine did not finish")


def _pressed(build_engine: Build, kv: Any, tokens: int, **options: Any) -> Any:
    parts = {"kv": kv, "scheduler": SWAP}
    memory = {"kv_memory_bytes": BYTES_PER_TOKEN * tokens, "kv_swap_bytes": 10_000_000}
    return build_engine(parts, **{**memory, **options})


@pytest.fixture
def roomy(build_engine: Build) -> dict[str, list[int]]:
    engine = build_engine({"attention": "eager", "kv": "dense", "scheduler": ("static", {"batch_size": 1})})
    return generate(engine, requests())


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_swapping_does_not_change_the_tokens(
    build_engine: Build, roomy: dict[str, list[int]], block_size: int, overlap: str
) -> None:
    engine = _pressed(build_engine, ("paged", {"block_size": block_size}), 160, engine={"overlap": overlap})
    for _ in range(2):
        assert generate(engine, requests()) == roomy
    counters = engine.report().counters
    assert counters["swaps_out"] == counters["swaps_in"] == counters["preemptions"] > 0
    assert counters["swap_out_bytes"] == counters["swap_in_bytes"] > 0
    assert counters["swap_out_bytes"] % (block_size * BYTES_PER_TOKEN) == 0
    assert counters["swap_stall_s"] > 0
    assert engine.report().executed["engine"]["swap_host_bytes"] <= 10_000_000
    prompts = sum(len(request.prompt_ids) + 11 for request in requests())
    assert counters["computed_tokens"] == 2 * prompts, "swapped tokens were computed again"


def test_drafts_survive_swapping(build_engine: Build, roomy: dict[str, list[int]]) -> None:
    """A verification row's rejected tokens are cut before its sequence leaves, and it goes on where it was."""
    parts = {"kv": ("paged", {"block_size": 4}), "scheduler": SWAP, "decoder": "prompt_lookup"}
    memory = {"kv_memory_bytes": BYTES_PER_TOKEN * 120, "kv_swap_bytes": 10_000_000, "max_model_len": 80}
    engine = build_engine(parts, **memory)
    assert generate(engine, requests()) == roomy
    assert engine.report().counters["swaps_out"] > 0


def test_sampled_tokens_survive_swapping(build_engine: Build) -> None:
    wanted = requests(temperature=1.0, top_p=0.95, repetition_penalty=1.2)
    engine = _pressed(build_engine, ("paged", {"block_size": 4}), 140)
    assert generate(engine, wanted) == generate(build_engine(), wanted)
    assert engine.report().counters["swaps_out"] > 0


def test_a_small_host_swaps_what_fits_and_recomputes_the_rest(build_engine: Build) -> None:
    wanted, kv = requests(max_new_tokens=30), ("paged", {"block_size": 4})
    engine = _pressed(build_engine, kv, 90, kv_swap_bytes=BYTES_PER_TOKEN * 24, max_model_len=80)
    assert generate(engine, wanted) == generate(build_engine(), wanted)
    counters = engine.report().counters
    assert counters["preemptions"] > counters["swaps_out"] > 0


def test_reset_in_the_middle_leaves_nothing_behind(build_engine: Build, roomy: dict[str, list[int]]) -> None:
    engine = _pressed(build_engine, ("paged", {"block_size": 4}), 140)
    for request in requests():
        engine.submit(request)
    while not engine.report().counters["swaps_out"]:
        engine.step()
    engine.reset()
    assert engine._space.usage().allocated_tokens == 0
    assert engine._space._host.num_used == 0
    assert engine.report().counters["swaps_out"] == 0
    assert generate(engine, requests()) == roomy


def test_what_leaves_moves_before_copies_and_what_comes_back_after(
    build_engine: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _pressed(build_engine, ("paged", {"block_size": 4}), 140)
    done: list[str] = []
    swapper, runner = engine._swapper, engine._runner
    execute, copy_blocks = swapper.execute, runner.copy_blocks
    monkeypatch.setattr(
        swapper, "execute", lambda moves: (done.append("out" if moves[0].to_host else "in"), execute(moves))
    )
    monkeypatch.setattr(runner, "copy_blocks", lambda: (done.append("copies"), copy_blocks()))
    launch = engine._launch
    monkeypatch.setattr(engine, "_launch", lambda plan: (done.append("step"), launch(plan)))
    generate(engine, requests())
    pairs = set(itertools.pairwise(done))
    assert {after for here, after in pairs if here == "out"} == {"copies"}
    assert {here for here, after in pairs if after == "in"} == {"copies"}
    assert {after for here, after in pairs if here == "in"} == {"step"}


def test_unstated_host_memory_is_an_error(build_engine: Build) -> None:
    with pytest.raises(UserError, match=r"limits\.kv_swap_bytes"):
        build_engine({"scheduler": SWAP})


def test_engines_that_recompute_have_no_host_memory(build_engine: Build) -> None:
    engine = build_engine(kv_swap_bytes=10_000_000)
    assert "swap_host_bytes" not in engine.report().executed["engine"]
    assert "swap_out_bytes" not in engine.report().counters


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_swapping_beside_captured_steps(build_engine: Build) -> None:
    wanted, kv = requests(), ("paged", {"block_size": 16})
    expected = generate(build_engine({"kv": kv}, device="cuda"), wanted)
    engine = _pressed(build_engine, kv, 160, device="cuda")
    assert generate(engine, wanted) == expected
    counters = engine.report().counters
    assert counters["graph_steps"] > 0
    assert counters["swaps_out"] == counters["swaps_in"] > 0
    assert counters["swap_out_bytes_per_s"] > 0
