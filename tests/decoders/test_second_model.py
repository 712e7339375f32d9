"""A draft model beside lossy parts: its check at load allows what those parts cost, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from decoding import generate, requests

Build = Callable[..., Any]
DRAFTS = [
    ("speculative", {"draft": "target", "acceptance": "coupled"}),
    ("self_speculative", {"skip_layers": (1,), "acceptance": "coupled"}),
]


@pytest.mark.parametrize("kv", [("quantized", {"block_size": 4}), ("kivi", {"group_size": 16})], ids=lambda kv: kv[0])
@pytest.mark.parametrize("decoder", DRAFTS, ids=lambda each: each[0])
def test_drafts_read_quantized_kv(build_engine: Build, decoder: Any, kv: Any) -> None:
    """The draft keeps its own KV in the target's layout, with the layout's loss."""
    engine = build_engine(parts={"decoder": decoder, "kv": kv})
    found = generate(engine, requests({}))
    assert engine.report().counters["accepted_draft_tokens"] > 0
    if kv[0] == "quantized":  # each token by itself, so that rounds do not show
        assert found == generate(build_engine(parts={"kv": kv}), requests({}))


@pytest.mark.parametrize("quantizer", ["int8", "nf4"])
def test_drafts_of_rounded_activations(build_engine: Build, quantizer: str) -> None:
    plain = generate(build_engine(), requests({}))
    options = {"draft": "target", "draft_quantizer": quantizer}
    engine = build_engine(parts={"decoder": ("speculative", options)})
    assert generate(engine, requests({})) == plain
    assert engine.report().counters["accepted_draft_tokens"] > 0


def test_layers_of_a_target_with_rounded_activations(build_engine: Build) -> None:
    engine = build_engine(parts={"decoder": DRAFTS[1], "quantizer": "int8"})
    found = generate(engine, requests({}))
    assert all(len(found[each.request_id]) <= each.sampling.max_new_tokens for each in requests({}))
    assert engine.report().counters["accepted_draft_tokens"] > 0


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_drafts_know_what_penalties_see(build_engine: Build, acceptance: str) -> None:
    """The target as its own draft: greedy drafts are what it says itself, penalised for the same tokens."""
    wanted = requests({"repetition_penalty": 1.3})
    options = {"draft": "target", "acceptance": acceptance}
    engine = build_engine(parts={"decoder": ("speculative", options)})
    assert generate(engine, wanted) == generate(build_engine(), wanted)
    counters = engine.report().counters
    assert counters["accepted_draft_tokens"] == counters["draft_tokens"] > 0


def test_rejection_does_not_look_at_the_company(build_engine: Build) -> None:
    """Rounds of a fixed length begin where they would begin for the request alone."""
    wanted = requests({"temperature": 0.9})
    drafting = ("speculative", {"draft": "target", "draft_quantizer": "rtn"})
    together = generate(build_engine(parts={"decoder": drafting}), wanted)
    alone = build_engine(parts={"decoder": drafting, "scheduler": ("static", {"batch_size": 1})})
    assert generate(alone, list(reversed(wanted))) == together
    assert generate(build_engine(), wanted) != together
