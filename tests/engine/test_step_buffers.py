"""The buffers of a captured step, filled and run without capturing: everything but the graph itself, on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.engine.graphs import StepBuffers, batch_buckets, context_buckets
from infermix.roles.scheduler import Plan
from uncaptured import LANES, uncaptured
from verification_rows import Rows, reference_model, rows_of, run

Build = Callable[..., Any]
QUERY_LENS = (1, 2, 5, 16)
PAGED = ("paged", {"block_size": 4})


@pytest.fixture
def model(tiny_llama: Path) -> Any:
    return reference_model(tiny_llama)


def check(engine: Any, model: Any, rows: Rows) -> None:
    expected = rows.expected(model)
    graphs, engine._runner.graphs = engine._runner.graphs, None
    with torch.inference_mode():
        eager = run(engine._runner, rows)
        engine._runner.graphs = graphs
        before = engine._runner.num_graph_steps
        stepped = run(engine._runner, rows)
    assert engine._runner.num_graph_steps == before + 1
    assert torch.allclose(eager, expected, atol=1e-4)
    assert torch.allclose(stepped, expected, atol=1e-4)


@pytest.mark.parametrize("query_len", QUERY_LENS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kv", ["dense", PAGED])
def test_rows_of_drafts_give_the_models_logits(
    build_engine: Build, model: Any, kv: Any, attention: str, query_len: int
) -> None:
    """Five rows in six, one of them in flight: padding, and a first token that only the device knows."""
    engine = build_engine({"kv": kv, "attention": attention}, max_num_seqs=LANES)
    engine._runner.graphs = uncaptured(engine, (query_len,))
    check(engine, model, rows_of(engine, (3, 17, 1, 40, 28), query_len, (False, True, True)))


@pytest.mark.parametrize("query_len", QUERY_LENS)
def test_holes_between_fixed_rows_are_padding(build_engine: Build, model: Any, query_len: int) -> None:
    engine = build_engine({"kv": "dense"}, max_num_seqs=LANES)
    engine._runner.graphs = uncaptured(engine, (query_len,))
    check(engine, model, rows_of(engine, (None, 9, None, None, 21), query_len, (True, False)))


def test_a_stage_keeps_nothing_of_an_earlier_step(build_engine: Build, model: Any) -> None:
    """More steps than stages, of fewer and fewer rows with shorter and shorter tables."""
    engine = build_engine({"kv": PAGED}, max_num_seqs=LANES)
    engine._runner.graphs = uncaptured(engine, (2,))
    for seed, contexts in enumerate([(60, 50, 40, 30, 20, 10)] * 2 + [(9, 8, 7, 6, 5)] * 3 + [(1, 2, 3, 4, 1)] * 3):
        rows = rows_of(engine, contexts, 2, (seed % 2 == 0,), seed)
        check(engine, model, rows)
        for entry in rows.entries:
            engine._space.release(entry.sequence.seq_id)


def test_rows_of_different_lengths_run_eagerly(build_engine: Build, model: Any) -> None:
    engine = build_engine({"kv": PAGED}, max_num_seqs=LANES)
    engine._runner.graphs = uncaptured(engine, (1, 2))
    rows = rows_of(engine, (5, 9), 2, (True,))
    shorter = rows_of(engine, (7,), 1, (True,)).entries[0]
    assert engine._runner._captured([*rows.entries, shorter]) is None
    assert engine._runner._captured(rows.entries) is not None
    assert engine._runner._captured(rows_of(engine, (5,), 3, (True,)).entries) is None


def test_padding_writes_to_the_sink_and_has_no_context(build_engine: Build) -> None:
    engine = build_engine({"kv": PAGED}, max_num_seqs=LANES)
    shape = engine._shape
    buffers = StepBuffers(4, 3, shape, LANES, torch.device("cpu"))
    rows = rows_of(engine, (6, 2), 3, (True, False))
    buffers.fill(rows.entries, engine._space)
    step = buffers.device
    assert step["context_lens"].tolist() == [9, 5, 0, 0]
    assert step["positions"].tolist() == [6, 7, 8, 2, 3, 4] + [0] * 6
    assert step["lanes"].tolist() == [0, 1, LANES, LANES]
    assert step["slots"][0, 6:].tolist() == [shape.sink_block * shape.block_size] * 6
    assert set(step["tables"][0, 2:].flatten().tolist()) == {shape.sink_block}
    drafts = [list(entry.draft_ids) for entry in rows.entries]
    assert step["host_ids"].tolist() == [-1, *drafts[0], rows.texts[1][2], *drafts[1]] + [0] * 6
    slots = step["slots"][0, :3].tolist()
    table = engine._space.block_table(0)
    assert slots == [table[position // 4] * 4 + position % 4 for position in (6, 7, 8)]


def test_plain_decode_marks_its_last_token_as_in_flight(build_engine: Build) -> None:
    """Without drafts a row may hold several known tokens; only the last can be in flight."""
    engine = build_engine({"kv": PAGED}, max_num_seqs=LANES)
    (entry,) = rows_of(engine, (6,), 1, (True,)).entries
    entry.sequence.num_computed = 4
    buffers = StepBuffers(1, 3, engine._shape, LANES, torch.device("cpu"))
    buffers.fill([type(entry)(entry.sequence, 3)], engine._space)
    assert buffers.device["host_ids"].tolist() == [*entry.sequence.tokens[4:6], -1]


def test_batches_end_at_the_rows_that_the_kv_holds(build_engine: Build, model: Any) -> None:
    """Fewer rows than lanes: a captured step of more rows would read behind the pools."""
    row_bytes = 128 * 2 * 2 * 2 * 16 * 4
    engine = build_engine({"kv": "dense"}, max_num_seqs=LANES, kv_memory_bytes=4 * row_bytes)
    assert engine._shape.num_blocks == 3
    engine._runner.graphs = uncaptured(engine, (1,))
    assert max(key.batch for key in engine._runner.graphs.keys) == 3
    check(engine, model, rows_of(engine, (3, 17, 1), 1, (False, True)))


def test_the_most_likely_token_comes_with_the_logits(build_engine: Build) -> None:
    engine = build_engine({"kv": "dense"}, max_num_seqs=LANES)
    engine._runner.graphs = uncaptured(engine, (1,))
    rows = rows_of(engine, (None, 9, None, 30), 1, (True,))
    with torch.inference_mode():
        forward = engine._runner.forward(Plan(rows.entries))
    assert forward.most_likely is not None
    assert forward.most_likely.tolist() == forward.logits.argmax(-1).tolist()
    assert forward.lanes.tolist() == [1, 3]


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 65, 250])
def test_buckets_hold_everything_up_to_the_limit(most: int) -> None:
    sizes = batch_buckets(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert all(later <= max(2 * earlier, earlier + 32) for earlier, later in itertools.pairwise(sizes))
    assert context_buckets(100 * most)[-1] == 100 * most
