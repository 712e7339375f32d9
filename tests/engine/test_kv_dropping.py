"""Layouts with rings or dropped tokens in the engine: joins, finishes, preemption, pieces, scoring."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.errors import UserError
from infermix.roles.engine import ScoreRequest
from infermix.roles.request import Request, SamplingParams

Build = Callable[..., Any]
HYBRID = ("hybrid", {"block_size": 4, "max_chunk_tokens": 5})
WINDOW = 8


@pytest.fixture(scope="module")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers with a window of 8, one full layer."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=WINDOW, eos_token_id=5,
        bos_token_id=1, initializer_range=0.15, query_pre_attn_scalar=16, tie_word_embeddings=False,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("tiny_gemma3")
    Gemma3ForCausalLM(config).save_pretrained(directory)
    return directory


def requests(lengths: tuple[int, ...] = (1, 40, 9, 70, 23, 55), max_new_tokens: int = 30) -> list[Request]:
    rng = random.Random(1)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    return [
        Request(request_id=str(i), prompt_ids=tuple(rng.randrange(6, 96) for _ in range(length)), sampling=sampling)
        for i, length in enumerate(lengths)
    ]


def generate(engine: Any, wanted: list[Request]) -> dict[str, list[int]]:
    for request in wanted:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


@pytest.fixture(scope="module")
def expected_holder() -> dict[str, Any]:
    return {}


@pytest.fixture
def expected(build_engine: Build, tiny_gemma3: Path, expected_holder: dict[str, Any]) -> dict[str, list[int]]:
    if not expected_holder:
        engine = build_engine({"kv": ("paged", {"block_size": 4})}, model=tiny_gemma3)
        expected_holder["tokens"] = generate(engine, requests())
    return expected_holder["tokens"]


SCHEDULERS = {
    "whole": "continuous",
    "chunked": ("continuous", {"max_num_batched_tokens": 7, "chunked": True}),
    "static": ("static", {"batch_size": 3}),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_hybrid_gives_the_tokens_of_paged(
    build_engine: Build, tiny_gemma3: Path, expected: dict[str, list[int]], scheduler: str
) -> None:
    engine = build_engine({"kv": HYBRID, "scheduler": SCHEDULERS[scheduler]}, model=tiny_gemma3)
    assert generate(engine, requests()) == expected
    report = engine.report()
    paged, ring = report.executed["kv"]["tables"]
    assert (paged["layers"], ring["layers"], ring["windows"]) == (1, 5, [WINDOW])
    assert ring["blocks_per_sequence"] == 3  # window + pieces of 5 tokens
    assert paged["bytes"] + ring["bytes"] == report.kv_bytes
    stored = sum(len(request.prompt_ids) + 29 for request in requests())
    assert report.counters["kv_stored_slots"] >= 2 * stored
    overwritten = sum(len(request.prompt_ids) + 29 - 12 for request in requests())
    assert overwritten <= report.counters["kv_overwritten_slots"] <= overwritten + len(requests())
    engine.reset()
    assert engine.report().counters["kv_overwritten_slots"] == 0


def test_preemption_keeps_the_tokens(build_engine: Build, tiny_gemma3: Path, expected: dict[str, list[int]]) -> None:
    block = 4 * 2 * 2 * 16 * 4  # tokens, K and V, heads, width, bytes
    memory = block * (40 + 1) + 5 * block * (24 + 1)
    engine = build_engine({"kv": HYBRID}, model=tiny_gemma3, kv_memory_bytes=memory)
    assert generate(engine, requests()) == expected
    assert engine.report().counters["preemptions"] > 0


def test_a_long_prompt_runs_in_pieces(build_engine: Build, tiny_gemma3: Path) -> None:
    engine = build_engine({"kv": HYBRID}, model=tiny_gemma3)
    generate(engine, requests((23,), max_new_tokens=2))
    assert engine.report().counters["eager_steps"] == 5 + 1


@pytest.mark.parametrize("protocol", ["prefill", "decode"])
def test_scores_are_those_of_paged(build_engine: Build, tiny_gemma3: Path, protocol: str) -> None:
    wanted = [ScoreRequest(request.prompt_ids, first=3, protocol=protocol) for request in requests((40, 70, 23))]
    paged, hybrid = (
        build_engine({"kv": kv}, model=tiny_gemma3).score(wanted) for kv in (("paged", {"block_size": 4}), HYBRID)
    )
    for left, right in zip(paged, hybrid, strict=True):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)


def test_windowed_needs_windows_in_all_layers(build_engine: Build, tiny_gemma3: Path) -> None:
    with pytest.raises(UserError, match="1 layers of the model have no sliding window"):
        build_engine({"kv": "windowed"}, model=tiny_gemma3)
