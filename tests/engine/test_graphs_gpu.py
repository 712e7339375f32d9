"""Steps replayed from CUDA graphs: the logits of eager steps, no host sync, no allocation, the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.engine.graphs import StepGraphs
from infermix.plugins import Catalogue
from infermix.roles.component import Choice, Role
from infermix.roles.request import Request, SamplingParams
from infermix.roles.scheduler import Plan
from verification_rows import ALL, Rows, reference_model, rows_of, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Build = Callable[..., Any]
QUERY_LENS = (1, 2, 5, 16)
LAYOUTS = ["dense", ("paged", {"block_size": 16})]
LANES = 6
#: fp32 with TF32 off: products of other shapes add up in another order.
TOLERANCE = 1e-3


@pytest.fixture
def build_on_gpu(build_engine: Build) -> Build:
    def build(*args: Any, **given: Any) -> Any:
        return build_engine(*args, device="cuda", kv_memory_bytes=1 << 26, **given)

    return build


@pytest.fixture
def strict_sync() -> Iterator[Callable[[], None]]:
    """Any wait of the host for the device raises from the call on."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def capture(engine: Any, query_lens: tuple[int, ...]) -> StepGraphs:
    graphs = StepGraphs(engine._joint, engine._shape, engine._runner._next_ids, LANES, query_lens)
    with torch.inference_mode():
        assert list(graphs.capture_all())[-1] == 1
    return graphs


def check(engine: Any, graphs: StepGraphs, rows: Rows, model: Any) -> None:
    with torch.inference_mode():
        engine._runner.graphs = None
        eager = run(engine._runner, rows)
        engine._runner.graphs = graphs
        before = engine._runner.num_graph_steps
        replayed = run(engine._runner, rows)
    assert engine._runner.num_graph_steps == before + 1
    assert torch.allclose(eager, rows.expected(model), atol=TOLERANCE)
    assert torch.allclose(replayed, eager, atol=TOLERANCE)
    assert not torch.isnan(replayed).any()


@pytest.mark.parametrize("query_len", QUERY_LENS)
@pytest.mark.parametrize("kv", LAYOUTS)
def test_replayed_logits_equal_eager_ones(build_on_gpu: Build, tiny_llama: Path, kv: Any, query_len: int) -> None:
    """Five rows in six, tokens in flight, and then fewer rows in the same graph's memory."""
    model = reference_model(tiny_llama)
    engine = build_on_gpu({"kv": kv}, engine={"graphs": "off"}, max_num_seqs=LANES)
    graphs = capture(engine, (query_len,))
    for seed, contexts in enumerate([(3, 17, 1, 40, 28), (30, 2), (1,), (70, 60, 50, 40, 30, 20)]):
        rows = rows_of(engine, contexts, query_len, (False, True, True), seed)
        check(engine, graphs, rows, model)
        for entry in rows.entries:
            engine._space.release(entry.sequence.seq_id)


@pytest.mark.parametrize("query_len", QUERY_LENS)
def test_holes_between_fixed_rows(build_on_gpu: Build, tiny_llama: Path, query_len: int) -> None:
    engine = build_on_gpu({"kv": "dense"}, engine={"graphs": "off"}, max_num_seqs=LANES)
    rows = rows_of(engine, (None, 9, None, None, 21), query_len, (True, False))
    check(engine, capture(engine, (query_len,)), rows, reference_model(tiny_llama))


@pytest.mark.parametrize("query_len", QUERY_LENS)
@pytest.mark.parametrize("kv", LAYOUTS)
def test_a_replay_neither_waits_nor_allocates(
    build_on_gpu: Build, strict_sync: Callable[[], None], kv: Any, query_len: int
) -> None:
    engine = build_on_gpu({"kv": kv}, engine={"graphs": "off"}, max_num_seqs=LANES)
    engine._runner.graphs = capture(engine, (query_len,))
    rows = rows_of(engine, (3, 17, 1, 40, 28), query_len, (True,))
    step = engine._runner._captured(rows.entries)
    assert step is not None
    with torch.inference_mode():
        engine._runner.forward(Plan(list(rows.entries)), ALL)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        strict_sync()
        for _ in range(5):
            step.buffers.fill(rows.entries, engine._space)
            step.graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        engine._runner.forward(Plan(list(rows.entries)), ALL)
        engine._runner.forward(Plan(list(rows.entries)))


def test_the_engine_captures_what_its_decoder_launches(
    build_on_gpu: Build, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_on_gpu().report().graphs["query_lens"] == [1]
    kind = type(catalogue.find(Role.DECODER, "autoregressive").component.build(None, None))
    monkeypatch.setattr(kind, "query_lens", (1, 5), raising=False)
    assert build_on_gpu().report().graphs["query_lens"] == [1, 5]


def generate(engine: Any, **sampling: Any) -> dict[str, list[int]]:
    rng = random.Random(0)
    tokens: dict[str, list[int]] = {}
    for number in range(14):
        prompt = tuple(rng.randrange(6, 96) for _ in range(rng.randrange(1, 60)))
        params = SamplingParams(max_new_tokens=rng.randrange(1, 40), seed=number, **sampling)
        engine.submit(Request(request_id=str(number), prompt_ids=prompt, sampling=params))
        tokens[str(number)] = []
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 20}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kv", LAYOUTS)
def test_tokens_are_the_same_with_graphs_and_without(
    build_on_gpu: Build, build_engine: Build, kv: Any, sampling: dict[str, Any]
) -> None:
    captured = build_on_gpu({"kv": kv})
    assert captured.report().graphs["captured"] > 0
    before = captured.report().counters["graph_captures"]
    tokens = generate(captured, **sampling)
    assert captured.report().counters["graph_steps"] > 0
    assert captured.report().counters["graph_captures"] == before
    assert tokens == generate(build_on_gpu({"kv": kv}, engine={"graphs": "off"}), **sampling)
    assert tokens == generate(build_on_gpu({"kv": kv}, engine={"overlap": "off"}), **sampling)
    if not sampling:
        assert tokens == generate(build_engine({"kv": kv}))


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_compiled_layers_inside_graphs(build_on_gpu: Build, catalogue: Catalogue, mode: str) -> None:
    registered = catalogue.find(Role.TRANSFORM, "compile")
    choice = Choice(registered, registered.component.options(mode=mode))
    engine = build_on_gpu(transforms=(choice,))
    before = engine.report().counters["compiles"]
    assert generate(engine) == generate(build_on_gpu())
    assert engine.report().counters["graph_steps"] > 0
    assert engine.report().counters["compiles"] == before > 0
