"""Draft trees: the tokens of plain decoding, whatever the trees look like and wherever K and V lie."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import generate, requests
from infermix.engine import kept_paths
from infermix.roles.component import Role
from infermix.roles.decoder import Forward
from infermix.roles.request import Request, Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.conformance import example_machine, example_model
from infermix.toolkit.tree_verification import DraftTree, TreeDecoder, Verified, equal_draws
from uncaptured import LANES, uncaptured

Build = Callable[..., Any]
LAYOUTS: list[Any] = [("concat", {}), ("dense", {}), ("paged", {"block_size": 4})]
LAYOUTS += [("paged", {"block_size": 4, "prefix_cache": "radix"}), ("quantized", {"block_size": 4})]
SCHEDULERS = [
    ("static", {"batch_size": 3}),
    ("continuous", {"max_num_seqs": 4, "max_num_batched_tokens": 9, "chunked": True}),
]


class Oracle:
    """Trees that hold the right continuation somewhere, in random order among wrong guesses."""

    num_nodes, reads_hidden = 12, False

    def __init__(self, truth: dict[str, list[int]]) -> None:
        self._truth, self._rng = truth, random.Random(5)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> Seq[DraftTree]:
        return [self._tree(sequence, depth) for sequence, depth in zip(sequences, depths, strict=True)]

    def _tree(self, sequence: Sequence, depth: int) -> DraftTree:
        done = sequence.num_output_tokens
        right = self._truth[sequence.request.request_id][done : done + self._rng.randint(0, depth)]
        tokens: list[int] = []
        parents: list[int] = []
        last = -1
        while right or len(tokens) < 4:
            guess = right[0] if right and self._rng.random() < 0.4 else self._rng.randrange(6, 96)
            parent = last if right else self._rng.randrange(-1, len(tokens))
            if len(tokens) == self.num_nodes:
                break
            tokens.append(guess)
            parents.append(parent)
            if right and guess == right[0]:
                last, right = len(tokens) - 1, right[1:]
        return DraftTree(tuple(tokens), tuple(parents))

    def observe(self, verified: Seq[Verified], forward: Forward) -> None:
        """It knows everything."""

    def forget(self, sequence: Sequence) -> None:
        """It keeps nothing."""


def with_oracle(engine: Any, truth: dict[str, list[int]], uniform: bool = False) -> Any:
    engine._decoder = TreeDecoder(Oracle(truth), 5, 128, uniform=uniform)
    return engine


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda each: each[0])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: "-".join(map(str, (each[0], *each[1].values()))))
def test_same_tokens_as_plain_decoding(build_engine: Build, layout: Any, scheduler: Any) -> None:
    wanted = requests({"temperature": 0.8, "repetition_penalty": 1.05})
    attention = "eager" if scheduler[0] == "static" else "sdpa"
    parts = {"kv": layout, "attention": attention, "scheduler": scheduler}
    truth = generate(build_engine(parts=parts), wanted)
    engine = with_oracle(build_engine(parts=parts), truth)
    assert generate(engine, wanted) == truth
    counters = engine.report().counters
    assert counters["accepted_draft_tokens"] > 20
    assert counters["draft_tokens"] > 2 * counters["accepted_draft_tokens"]


def test_filled_steps(build_engine: Build) -> None:
    wanted = requests({})
    truth = generate(build_engine(), wanted)
    assert generate(with_oracle(build_engine(), truth, uniform=True), wanted) == truth


@pytest.mark.parametrize("layout", ["dense", ("paged", {"block_size": 4})], ids=str)
def test_steps_of_fixed_shape(build_engine: Build, layout: Any) -> None:
    """Filled trees fit the buffers of a captured step, mask and hidden states included."""
    wanted = requests({"temperature": 0.7}, count=5)
    truth = generate(build_engine(), wanted)
    engine = with_oracle(build_engine(parts={"kv": layout}, max_num_seqs=LANES), truth, uniform=True)
    engine._decoder.reads_hidden = True
    engine._joint.keep_hidden()
    engine._runner.graphs = uncaptured(engine, (1, Oracle.num_nodes + 1), trees=True)
    assert generate(engine, wanted) == truth
    assert engine.report().counters["graph_steps"] > 5
    assert engine.report().counters["accepted_draft_tokens"] > 5


def test_hidden_states_are_what_the_head_reads(build_engine: Build) -> None:
    """Of every forward and row: prompts in chunks, decodes, trees."""
    wanted = requests({}, count=5)
    scheduler = ("continuous", {"max_num_seqs": 4, "max_num_batched_tokens": 9, "chunked": True})
    truth = generate(build_engine(), wanted)
    engine = with_oracle(build_engine(parts={"scheduler": scheduler}), truth)
    engine._decoder.reads_hidden = True
    engine._joint.keep_hidden()
    head = engine._joint.model.get_output_embeddings()
    rows = []

    def see(verified: Seq[Verified], forward: Forward) -> None:
        assert forward.hidden is not None
        assert forward.first_rows is not None
        assert torch.allclose(head(forward.hidden[forward.hidden_rows]), forward.logits, atol=1e-5)
        for each in verified:
            own, first = each.entry.num_own_tokens, forward.first_rows[each.entry.sequence.seq_id]
            if each.token_ids:
                assert forward.hidden_rows is not None
                assert first + own - 1 in forward.hidden_rows
            rows.append(own)

    engine._decoder._drafter.observe = see
    assert generate(engine, wanted) == truth
    assert max(rows) > 1


def test_up_to_the_longest_length(build_engine: Build) -> None:
    """Near the end of what a sequence may hold trees get smaller."""
    wanted = [request for request in requests({}) if len(request.prompt_ids) + request.sampling.max_new_tokens < 29]
    truth = generate(build_engine(max_model_len=28), wanted)
    engine = build_engine(max_model_len=28)
    engine._decoder = TreeDecoder(Oracle(truth), 5, 28, uniform=True)
    assert generate(engine, wanted) == truth


def test_under_preemption(build_engine: Build) -> None:
    wanted = requests({"temperature": 0.8})
    truth = generate(build_engine(), wanted)
    engine = build_engine(
        parts={"kv": ("paged", {"block_size": 4})}, max_model_len=44, kv_memory_bytes=12 * 4 * 2 * 2 * 2 * 16 * 4
    )
    engine._decoder = TreeDecoder(Oracle(truth), 5, 44, uniform=False)
    assert generate(engine, wanted) == truth
    assert engine.report().counters["preemptions"] > 0
    assert engine._space.usage().allocated_tokens == 0


def test_kv_that_stays_where_it_was_is_seen(build_engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests({"temperature": 0.8})
    truth = generate(build_engine(), wanted)
    monkeypatch.setattr(kept_paths.KeptPaths, "move", lambda self: None)
    assert generate(with_oracle(build_engine(), truth), wanted) != truth


class Shaped:
    """Two trees of one shape, and a deeper one."""

    num_nodes, reads_hidden = 5, False
    alike, deeper = (-1, 0, -1), (-1, 0, 1, 2)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> Seq[DraftTree]:
        return [DraftTree((7, 8, 9), self.alike)] * 2 + [DraftTree((7, 8, 9, 6), self.deeper)]

    def observe(self, verified: Seq[Verified], forward: Forward) -> None:
        """Nothing is learnt."""


def test_rows_of_one_shape_are_filled_up_and_measured_once() -> None:
    wanted = Request(request_id="r", prompt_ids=(3, 4))
    plan = Plan([Scheduled(Sequence(number, wanted, [3, 4], 2, num_computed=1), 1) for number in range(3)])
    decoder = TreeDecoder(Shaped(), 4, 99, uniform=True)  # type: ignore[arg-type]
    measured, depth_of = [], decoder._depth_of
    decoder._depth_of = lambda parents: measured.append(parents) or depth_of(parents)  # type: ignore[func-returns-value]

    def forward(given: Plan, want: Any) -> Forward:
        rows = [entry.sequence for entry in given.entries for _ in range(entry.num_new_tokens)]
        return Forward(torch.empty(0), rows, torch.empty(0))

    runner = SimpleNamespace(forward=forward, reserve=lambda sequence, num_tokens: True)
    sampler = SimpleNamespace(sample_rows=lambda *_: torch.full((18,), 50), accept=lambda *_: None)
    ticket = decoder.launch(plan, runner, sampler)  # type: ignore[arg-type]
    decoder.collect(ticket)
    first, second, third = (row.entry.draft_parents for row in ticket.rows)
    assert first == (-1, 0, -1, -1, -1)
    assert second is first
    assert third == (-1, 0, 1, 2, -1)
    assert measured == [Shaped.alike, Shaped.deeper]
    counters = decoder.counters()
    assert [counters[f"drafted_at_{depth}"] for depth in (1, 2, 3, 4)] == [3, 3, 1, 1]
    assert counters["draft_tokens"] == 10


def test_draws_are_followed_down_the_tree() -> None:
    tree = DraftTree((7, 8, 9, 8, 4), (-1, -1, 1, 0, 3))
    assert equal_draws(tree, [8, 0, 9, 5, 0, 0]) == (1, 2)
    assert equal_draws(tree, [7, 8, 0, 0, 4, 6]) == (0, 3, 4)
    assert equal_draws(tree, [5, 0, 0, 0, 0, 0]) == ()
    assert tree.branch(4) == (7, 8, 4)
    assert tree.depths() == [1, 1, 2, 2, 3]


def test_layouts_that_cannot_move_do_not_say_so(catalogue: Any) -> None:
    """Of those that can cut, `plan` refuses trees over the ones that could not keep an accepted path."""
    names = []
    for registered in catalogue.all(Role.KV):
        component = registered.component
        features = component.provides(component.options(), example_model(), example_machine("cpu"))
        if "kv:move" in features:
            names.append(component.name)
            assert "kv:truncate" in features
    assert sorted(names) == ["concat", "dense", "latent", "paged", "quantized"]
