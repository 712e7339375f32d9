"""Rounds of guessing on a GPU: replayed from graphs they give the trees of rounds that are launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import generate, requests
from infermix_decoders.eagle_round import GuessingRound
from infermix_decoders.eagle_rounds import PaddedRounds, PlainRounds
from torch import Tensor
from watched_rounds import EAGLE, compare, plain_rounds

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Build = Callable[..., Any]
CUDA: dict[str, Any] = {"device": "cuda", "kv_memory_bytes": 1 << 26}
PARTS: dict[str, Any] = {"kv": ("paged", {"block_size": 16}), "attention": "triton"}
SAMPLED = {"temperature": 0.8}


def launched(rounds: PaddedRounds) -> PaddedRounds:
    """The same shapes without graphs."""
    return PaddedRounds(rounds.guess, rounds.shapes, torch.device("cuda"))


def test_a_replay_finds_the_trees_of_a_launched_round(build_engine: Build) -> None:
    """Of the same shapes all are the same; of others nearly all, since products of other shapes add up otherwise."""
    engine = build_engine(parts={**PARTS, "decoder": EAGLE}, **CUDA)
    rounds = engine._decoder._drafter._rounds
    assert isinstance(rounds, PaddedRounds)
    same = compare(engine, lambda guess: launched(rounds))
    other = compare(engine, plain_rounds)
    generate(engine, requests(SAMPLED, count=12))
    assert same.trees == other.trees > 60
    assert len(set(same.batches)) > 2
    assert same.different == 0
    assert other.different <= 0.02 * other.trees


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 8])
def test_the_tokens_of_plain_decoding(build_engine: Build, sampling: dict[str, Any], max_num_seqs: int) -> None:
    """With graphs and without, and every graph is there before the first step."""
    parts = {**PARTS, "scheduler": ("continuous", {"max_num_seqs": max_num_seqs})}
    given = {**CUDA, "max_num_seqs": max_num_seqs}
    wanted = requests(sampling)
    plain = generate(build_engine(parts=parts, **given), wanted)
    parts["decoder"] = EAGLE
    assert generate(build_engine(parts=parts, engine={"graphs": "off"}, **given), wanted) == plain
    engine = build_engine(parts=parts, **given)
    drafter = engine._decoder._drafter
    replayed = (drafter._rounds, drafter._together)
    captured = [dict(work._captured) for work in replayed]
    assert generate(engine, wanted) == plain
    assert [work._captured for work in replayed] == captured
    told = engine.report().executed["decoder"]["graphs"]
    assert told["captured"] == sum(map(len, captured)) > 0
    assert all(captured)
    assert told["batches"][-1] == max_num_seqs
    assert engine.report().counters["accepted_draft_tokens"] > 0


def test_under_preemption(build_engine: Build) -> None:
    """Lanes change hands between replays."""
    parts = {"kv": ("paged", {"block_size": 4}), "attention": "sdpa", "scheduler": "continuous"}
    wanted = requests(SAMPLED)
    plain = generate(build_engine(parts=parts, **CUDA), wanted)
    engine = build_engine(
        parts={**parts, "decoder": EAGLE},
        device="cuda", max_model_len=44, kv_memory_bytes=12 * 4 * 2 * 2 * 2 * 16 * 4,
    )  # fmt: skip
    assert generate(engine, wanted) == plain
    assert engine.report().counters["preemptions"] > 0
    assert engine.report().executed["decoder"]["graphs"]["captured"] > 0


def test_graphs_that_are_switched_off_are_told(build_engine: Build) -> None:
    engine = build_engine(parts={**PARTS, "decoder": EAGLE}, engine={"graphs": "off"}, **CUDA)
    told = engine.report().executed["decoder"]["graphs"]
    assert told == {"captured": 0, "reason": "switched off by the experiment"}
    assert isinstance(engine._decoder._drafter._rounds, PlainRounds)


def test_a_head_that_waits_for_the_device_runs_eagerly_and_says_so(
    build_engine: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a quantized one may: the steps of the target are captured all the same."""
    own = GuessingRound._log_probabilities

    def waiting(guess: GuessingRound, features: Tensor) -> Tensor:
        assert features.sum().item() is not None
        return own(guess, features)

    wanted = requests(SAMPLED)
    plain = generate(build_engine(parts=PARTS, **CUDA), wanted)
    monkeypatch.setattr(GuessingRound, "_log_probabilities", waiting)
    engine = build_engine(parts={**PARTS, "decoder": EAGLE}, **CUDA)
    told = engine.report().executed["decoder"]["graphs"]
    assert told["captured"] == 0
    assert "cannot be captured" in told["reason"]
    assert engine.report().graphs["captured"] > 0
    assert generate(engine, wanted) == plain
