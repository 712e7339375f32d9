"""Captured prefill and mixed steps, filled and run without capturing: everything but the graph itself, on a CPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.engine.mixed_graphs import MixedBuffers, MixedGraphs, MixedStep, token_buckets, worthwhile_tokens
from infermix.roles.attention import LayerSpec
from infermix.roles.batch import Batch
from infermix.roles.decoder import Want
from infermix.roles.kv_store import PagedView
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix.roles.scheduler import Plan, Scheduled
from torch import Tensor
from verification_rows import VOCAB, reference_model

Build = Callable[..., Any]
PAGED = ("paged", {"block_size": 4})
LANES = 5


class DeviceLengths:
    """Attention that learns every length from the device, as a captured mixed step demands."""

    reads = (PagedView,)

    def forward(self, q: Tensor, view: PagedView, batch: Batch, layer: LayerSpec) -> Tensor:
        starts = batch.cu_seqlens_q.long()
        token = torch.arange(q.shape[0])
        owner = torch.bucketize(token, starts[1:], right=True).clamp(max=len(starts) - 2)
        context = batch.context_lens.long()[owner]
        position = context - starts[owner + 1] + token
        keys, values = view.batched(batch.context_capacity)
        seen = torch.arange(keys.shape[1]) <= position[:, None]
        group = layer.num_heads // layer.num_kv_heads
        scores = torch.einsum("thd,tshd->ths", q, keys[owner].repeat_interleave(group, 2)) * layer.scale
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        return torch.einsum("ths,tshd->thd", weights, values[owner].repeat_interleave(group, 2))


class _Uncaptured:
    def __init__(self, graphs: MixedGraphs, bucket: int) -> None:
        self._graphs, self._bucket = graphs, bucket

    def replay(self) -> None:
        step = self._graphs._steps[self._bucket]
        step.logits, step.lanes, step.most_likely = self._graphs._step(step.batch)


def with_mixed_steps(engine: Any, max_tokens: int = 64) -> Any:
    """Every mixed step of `engine` is there, without any graph; its attention reads lengths on the device."""
    engine._joint.attach(DeviceLengths(), engine._store)
    graphs = MixedGraphs(engine._joint, engine._shape, engine._runner._next_ids, LANES, max_tokens)
    for bucket in graphs.buckets:
        nothing = torch.empty(0)
        graph: Any = _Uncaptured(graphs, bucket)
        graphs._steps[bucket] = MixedStep(
            graph, bucket, graphs.buffers.as_batch(bucket), nothing, nothing, nothing
        )  # fmt: skip
    engine._runner.mixed = graphs
    return engine


def sequence(number: int, tokens: list[int], computed: int = 0, in_flight: int | None = None) -> Sequence:
    request = Request(request_id=str(number), prompt_ids=tuple(tokens), sampling=SamplingParams())
    seq = Sequence(number, request, list(tokens), len(tokens), lane=number, num_computed=computed)
    seq.num_inflight = int(in_flight is not None)
    return seq


@pytest.fixture
def model(tiny_llama: Path) -> Any:
    return reference_model(tiny_llama)


@pytest.fixture
def engine(build_engine: Build) -> Any:
    return with_mixed_steps(build_engine({"kv": PAGED}, max_num_seqs=LANES))


def run(engine: Any, entries: list[Scheduled]) -> Any:
    for entry in entries:
        assert engine._space.reserve(entry.sequence.seq_id, entry.sequence.num_computed + entry.num_new_tokens)
    with torch.inference_mode():
        forward = engine._runner.forward(Plan(entries))
    for entry in entries:
        entry.sequence.num_computed += entry.num_new_tokens
    return forward


def test_prompts_chunks_and_decodes_in_one_step(engine: Any, model: Any) -> None:
    """Three steps: two prompts whole and one begun; decodes (one in flight) beside the chunk; everything at once."""
    rng = random.Random(0)
    texts = [[rng.choice(VOCAB) for _ in range(length)] for length in (7, 20, 31, 3)]
    seqs = [sequence(number, text) for number, text in enumerate(texts)]
    first = run(engine, [Scheduled(seqs[0], 7), Scheduled(seqs[1], 20), Scheduled(seqs[2], 10)])
    assert first.sequences == seqs[:2]
    check(first, model, texts[:2])

    for seq, token, in_flight in ((seqs[0], 50, True), (seqs[1], 60, False)):
        texts[seq.seq_id].append(token)
        if in_flight:
            seq.num_inflight, engine._runner._next_ids[seq.lane] = 1, token
        else:
            seq.tokens.append(token)
    second = run(engine, [Scheduled(seqs[0], 1), Scheduled(seqs[1], 1), Scheduled(seqs[2], 8)])
    assert second.sequences == seqs[:2]
    check(second, model, texts[:2])

    third = run(engine, [Scheduled(seqs[2], 13), Scheduled(seqs[3], 3)])
    check(third, model, texts[2:])
    assert engine._runner.num_mixed_graph_steps == 3
    assert engine._runner.num_eager_steps == 0


def check(forward: Any, model: Any, texts: list[list[int]]) -> None:
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([text])).logits[0, -1] for text in texts])
    assert torch.allclose(forward.logits, expected, atol=1e-4)
    assert forward.lanes.tolist() == [seq.lane for seq in forward.sequences]
    assert forward.most_likely.tolist() == expected.argmax(-1).tolist()


def test_steps_beyond_the_buckets_or_with_more_wishes_run_eagerly(build_engine: Build) -> None:
    engine = with_mixed_steps(build_engine({"kv": PAGED}, max_num_seqs=LANES), max_tokens=32)
    runner = engine._runner
    assert runner._captured_mixed([Scheduled(sequence(0, [7] * 33), 33)], Want()) is None
    rows = [Scheduled(sequence(0, [7] * 20), 20)]
    assert runner._captured_mixed(rows, Want(all_logits=True)) is None
    assert runner._captured_mixed(rows, Want()).num_tokens == 32
    assert runner.mixed.find(LANES + 1, 20, 20) is None
    assert runner.mixed.find(1, 20, runner.mixed.max_context + 1) is None


def test_whole_requests_give_the_same_tokens(build_engine: Build) -> None:
    chunked = ("continuous", {"max_num_batched_tokens": 24, "chunked": True})
    plain = build_engine({"kv": PAGED, "scheduler": chunked}, max_num_seqs=LANES)
    mixed = with_mixed_steps(build_engine({"kv": PAGED, "scheduler": chunked}, max_num_seqs=LANES))
    for sampling in ({}, {"temperature": 1.0, "top_k": 20}, {"repetition_penalty": 1.3, "min_new_tokens": 3}):
        assert generate(mixed, **sampling) == generate(plain, **sampling)
    counters = mixed.report().counters
    assert counters["mixed_graph_steps"] == counters["graph_steps"] > 0
    assert counters["eager_steps"] == 0


def generate(engine: Any, **sampling: Any) -> dict[str, list[int]]:
    rng = random.Random(0)
    tokens: dict[str, list[int]] = {}
    for number in range(9):
        prompt = tuple(rng.choice(VOCAB) for _ in range(rng.randrange(1, 60)))
        params = SamplingParams(max_new_tokens=rng.randrange(4, 12), seed=number, **sampling)
        engine.submit(Request(request_id=str(number), prompt_ids=prompt, sampling=params))
        tokens[str(number)] = []
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


def test_padding_belongs_to_one_more_sequence_without_context(build_engine: Build) -> None:
    engine = build_engine({"kv": PAGED}, max_num_seqs=LANES)
    shape = engine._shape
    buffers = MixedBuffers(16, 3, shape, LANES, 128, torch.device("cpu"))
    entries = [Scheduled(sequence(0, [7, 8, 9]), 3), Scheduled(sequence(1, [9] * 6, 5, in_flight=1), 1)]
    entries[1].sequence.tokens.pop()
    for entry, length in zip(entries, (3, 6), strict=True):
        assert engine._space.reserve(entry.sequence.seq_id, length)
    buffers.fill(entries, [2, 3], [0, 1], 8, engine._space)
    step = buffers.device
    assert step["host_ids"][:8].tolist() == [7, 8, 9, -2, 0, 0, 0, 0]
    assert step["positions"][:8].tolist() == [0, 1, 2, 5, 0, 0, 0, 0]
    assert step["starts"].tolist() == [0, 3, 4, 8, 8]
    assert step["context_lens"].tolist() == [3, 6, 0, 0]
    assert step["rows"].tolist() == [2, 3, 0]
    assert step["lanes"].tolist() == [0, 1, LANES]
    assert step["slots"][0, 4:8].tolist() == [shape.sink_block * 4] * 4
    assert set(step["tables"][0, 2:].flatten().tolist()) == {shape.sink_block}


@pytest.mark.parametrize("most", [16, 64, 512, 513, 2048, 5000, 8192])
def test_buckets_hold_every_step(most: int) -> None:
    sizes = token_buckets(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert all(later <= max(2 * earlier, earlier + 1024) for earlier, later in itertools.pairwise(sizes))


def test_small_models_wait_for_the_host_in_larger_steps() -> None:
    assert worthwhile_tokens(135_000_000) == 8192
    assert worthwhile_tokens(1_200_000_000) == 2048
    assert worthwhile_tokens(8_000_000_000) == 256
    assert worthwhile_tokens(1 << 42) == 1
