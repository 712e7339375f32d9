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


@pytest.mark.parametrize("decoder", [("prompt_lookup", {"num_draft_tokens": 4, "min_match_tokens": 1}), "jacobi"])
def test_drafts_behind_a_prompt_that_runs_in_pieces(
    build_engine: Build, tiny_gemma3: Path, expected: dict[str, list[int]], decoder: Any
) -> None:
    """The last piece has to leave room for the drafts that are verified with the prompt's last token."""
    parts = {"kv": ("hybrid", {"block_size": 4, "max_chunk_tokens": 9}), "decoder": decoder}
    engine = build_engine(parts, model=tiny_gemma3)
    assert generate(engine, requests()) == expected
    assert engine.report().counters["draft_tokens"] > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_drafts_over_sinks_and_a_window(build_engine: Build, preemption: str) -> None:
    """Lossy, so only lengths are known; memory for two of the longest sequences, where up to eight run."""
    window = ("sink_window", {"sink_tokens": 1, "window": 9, "block_size": 3, "max_chunk_tokens": 7})
    parts = {"kv": window, "decoder": ("jacobi", {"num_draft_tokens": 4})}
    parts["scheduler"] = ("continuous", {"max_num_batched_tokens": 16, "chunked": True, "preemption": preemption})
    block = 3 * 2 * 2 * 2 * 16 * 4
    engine = build_engine(parts, kv_memory_bytes=(2 * 7 + 1) * block, kv_swap_bytes=1 << 24)
    wanted = requests((1, 3, 9, 40, 23, 5, 17, 2))
    assert {len(tokens) for tokens in generate(engine, wanted).values()} == {30}
    assert engine.report().counters["preemptions"] > 0
    assert engine._space.usage().allocated_tokens == 0


def test_room_that_a_batch_reserves_ahead_is_not_written(build_engine: Build) -> None:
    """A static batch reserves its longest outputs at once; what drafts may be cut from is what was computed."""
    kivi = ("kivi", {"group_size": 4, "residual_length": 8, "block_size": 4})
    decoder = ("jacobi", {"num_draft_tokens": 4})
    engine = build_engine({"kv": kivi, "decoder": decoder, "scheduler": ("static", {"batch_size": 3})})
    assert {len(tokens) for tokens in generate(engine, requests((1, 9, 23))).values()} == {30}


def test_more_drafts_than_a_layout_takes_back_are_refused(build_engine: Build) -> None:
    """Also for decoders whose drafts the plan does not see, since another one wraps them."""
    kivi = ("kivi", {"group_size": 4, "residual_length": 8, "block_size": 4})
    with pytest.raises(UserError, match="drafts 5 tokens, of which the KV layout can take back 4"):
        build_engine({"kv": kivi, "decoder": ("prompt_lookup", {"num_draft_tokens": 5})})
    build_engine({"kv": kivi, "decoder": ("prompt_lookup", {"num_draft_tokens": 4})})


def test_preemption_keeps_the_tokens(build_engine: Build, tiny_gemma3: Path, expected: dict[str, list[int]]) -> None:
    block = 4 * 2 * 2 * 16 * 4  # tokens, K and V, heads, width, bytes
    memory = block * (40 + 1) + 5 * block * (24 + 1)
    engine = build_engine({"kv": HYBRID}, model=tiny_gemma3, kv_memory_bytes=memory)
    assert generate(engine, requests()) == expected
    assert engine.report().counters["preemptions"] > 0


def test_swapping_keeps_the_tokens(build_engine: Build, tiny_gemma3: Path, expected: dict[str, list[int]]) -> None:
    """Rings and paged blocks leave and come back together; counters of ended sequences count each once."""
    block = 4 * 2 * 2 * 16 * 4
    parts = {"kv": HYBRID, "scheduler": ("continuous", {"preemption": "swap"})}
    memory = {"kv_memory_bytes": block * (40 + 1) + 5 * block * (24 + 1), "kv_swap_bytes": 10_000_000}
    engine = build_engine(parts, model=tiny_gemma3, **memory)
    assert generate(engine, requests()) == expected
    counters = engine.report().counters
    assert counters["swaps_out"] == counters["swaps_in"] == counters["preemptions"] > 0
    stored = sum(len(request.prompt_ids) + 29 for request in requests())
    assert 2 * stored <= counters["kv_stored_slots"] <= 2 * (stored + len(requests()))


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


LOSSY = {
    "sink_window": ("sink_window", {"sink_tokens": 4, "window": 12, "block_size": 4, "max_chunk_tokens": 8}),
    "h2o": ("h2o", {"budget": 16, "slack": 4, "block_size": 4}),
    "snapkv": ("snapkv", {"budget": 16, "observation_window": 4, "pool_kernel": 3, "block_size": 4}),
}


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_tokens_do_not_depend_on_the_batch(build_engine: Build, name: str) -> None:
    engine = build_engine({"kv": LOSSY[name]})
    together = generate(engine, requests())
    counters = engine.report().counters
    alone = {request.request_id: generate(engine, [request])[request.request_id] for request in requests()}
    assert together == alone
    exact = generate(build_engine({"kv": ("paged", {"block_size": 4})}), requests())
    assert together != exact
    assert together["0"][:4] == exact["0"][:4]  # nothing is dropped of a sequence this short
    total = sum(len(request.prompt_ids) + 29 for request in requests())
    assert 0 < counters["kv_dropped_tokens"] < counters["kv_ended_tokens"]
    assert total <= counters["kv_ended_tokens"] <= total + len(requests())
    assert engine.report().self_check["attention"].startswith("not checked alone")


@pytest.mark.parametrize("name", LOSSY)
def test_swapping_changes_nothing_of_what_was_dropped(build_engine: Build, name: str) -> None:
    """Computed again, a sequence would be cut elsewhere; from the host it comes back as it was."""
    block = 4 * 2 * 2 * (2 * 16 + (name != "sink_window")) * 4
    parts = {"kv": LOSSY[name], "scheduler": ("continuous", {"preemption": "swap"})}
    engine = build_engine(parts, kv_memory_bytes=34 * block, kv_swap_bytes=10_000_000)
    calm, wanted = build_engine({"kv": LOSSY[name]}), requests((9, 5, 37, 3, 6, 52, 2, 8))
    assert generate(engine, wanted) == generate(calm, wanted)
    counters = engine.report().counters
    assert counters["swaps_out"] == counters["swaps_in"] == counters["preemptions"] > 0
    assert counters["kv_dropped_tokens"] == calm.report().counters["kv_dropped_tokens"] > 0


@pytest.mark.parametrize("name", LOSSY)
def test_a_fork_goes_on_as_its_parent_does(build_engine: Build, name: str) -> None:
    engine, (parent,) = build_engine({"kv": LOSSY[name]}), requests((40,))
    engine.submit(parent)
    tokens: dict[str, list[int]] = {"0": [], "child": []}
    while len(tokens["0"]) < 12:
        tokens["0"] += [token for event in engine.step() for token in event.token_ids]
    begun = tuple(tokens["0"])
    sampling = SamplingParams(max_new_tokens=30 - len(begun), ignore_eos=True)
    engine.fork("0", Request(request_id="child", prompt_ids=parent.prompt_ids + begun, sampling=sampling))
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert tokens["0"] == [*begun, *tokens["child"]]
    assert engine.report().counters["computed_tokens"] == 40 + 29 + 30 - len(begun), "nothing was shared"


@pytest.mark.parametrize("name", LOSSY)
def test_dropped_tokens_make_room(build_engine: Build, name: str) -> None:
    """With memory for one longest sequence, more run at once than where every token stays."""
    memory = 2 * 4 * 2 * 2 * 16 * 4 * (32 + 1) + 2 * 4 * 2 * 4 * (32 + 1)  # K and V of both layers, and scores
    lossy, paged = (
        build_engine({"kv": kv}, kv_memory_bytes=memory) for kv in (LOSSY[name], ("paged", {"block_size": 4}))
    )
    for engine in (lossy, paged):
        generate(engine, requests())
    less, more = (each.report().counters for each in (lossy, paged))
    assert less["preemptions"] <= more["preemptions"]
    assert less["steps"] < more["steps"]


def test_sink_window_memory_is_constant(build_engine: Build) -> None:
    """One sink block, a window of 12 and a piece of 8 in blocks of 4: 7 blocks a sequence, whatever its length."""
    engine = build_engine({"kv": LOSSY["sink_window"]}, max_num_seqs=2)
    report = engine.report()
    (table,) = report.executed["kv"]["tables"]
    assert table["blocks_per_sequence"] == 7
    assert report.kv_bytes == table["bytes"] == (2 * 7 + 1) * 4 * report.kv_bytes_per_token
    longest = report.executed["engine"]["max_model_len"]
    assert report.kv_allocated_bytes_per_token == 7 * 4 * report.kv_bytes_per_token / longest


ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.mark.parametrize("attention", [pytest.param(name, marks=ON_GPU) for name in ("eager", "triton")])
def test_hybrid_gives_the_tokens_of_paged_from_graphs(build_engine: Build, tiny_gemma3: Path, attention: str) -> None:
    """Decode steps replayed from CUDA graphs, block tables of rings included."""
    paged, hybrid = (
        build_engine({"attention": attention, "kv": kv}, model=tiny_gemma3, device="cuda", kv_memory_bytes=1 << 24)
        for kv in (("paged", {"block_size": 4}), HYBRID)
    )
    assert generate(hybrid, requests()) == generate(paged, requests())
    assert hybrid.report().counters["graph_steps"] > hybrid.report().counters["eager_steps"]


@pytest.mark.parametrize("attention", [pytest.param(name, marks=ON_GPU) for name in ("eager", "triton")])
@pytest.mark.parametrize("name", LOSSY)
def test_lossy_tokens_from_graphs_are_the_eager_ones(build_engine: Build, name: str, attention: str) -> None:
    captured, eager = (
        build_engine(
            {"attention": attention, "kv": LOSSY[name]}, {"graphs": graphs}, device="cuda", kv_memory_bytes=1 << 24
        )
        for graphs in ("auto", "off")
    )
    assert generate(captured, requests()) == generate(eager, requests())
    counters = captured.report().counters
    assert counters["kv_dropped_tokens"] > 0
    assert (counters["graph_steps"] > 0) == (name != "h2o")
