"""A draft model beside lossy parts: its check at load allows what those parts cost, and no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from decoding import generate, requests
from infermix.engine.second import SecondModel
from infermix.toolkit.verification import completes

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


def test_drawn_drafts_know_what_penalties_see(build_engine: Build) -> None:
    """Those of the same round among it: else the draft's distributions depend on where rounds begin."""
    wanted = requests({"temperature": 0.9, "repetition_penalty": 0.2})
    engine = build_engine(parts={"decoder": ("speculative", {"draft": "target", "num_draft_tokens": 7})})
    generate(engine, wanted)
    counters = engine.report().counters
    assert counters["accepted_draft_tokens"] == counters["draft_tokens"] > 0


#: A draft that the target often contradicts.
ROUGH = {
    "draft": "target", "draft_quantizer": "rtn", "draft_quantizer_options": {"bits": 2, "group_size": 16},
}  # fmt: skip
REJECTING = [
    ("speculative", ROUGH),
    ("speculative", {**ROUGH, "adaptive": True, "num_draft_tokens": 6}),
    ("speculative", {**ROUGH, "num_draft_tokens": 1}),
    ("self_speculative", {"skip_layers": (1,)}),
]


def _name(decoder: Any) -> str:
    return f"{decoder[0]}-{decoder[1].get('num_draft_tokens', 4)}{'-adaptive' if 'adaptive' in decoder[1] else ''}"


@pytest.mark.parametrize("drafting", REJECTING, ids=_name)
def test_rejection_does_not_look_at_the_company(build_engine: Build, drafting: Any) -> None:
    wanted = requests({"temperature": 0.9})
    together = build_engine(parts={"decoder": drafting})
    tokens = generate(together, wanted)
    alone = build_engine(parts={"decoder": drafting, "scheduler": ("static", {"batch_size": 1})})
    assert generate(alone, list(reversed(wanted))) == tokens
    assert generate(build_engine(), wanted) != tokens
    counters = together.report().counters
    assert 0 < counters["accepted_draft_tokens"] < counters["draft_tokens"]


@pytest.mark.parametrize("drafting", REJECTING, ids=_name)
def test_rejection_does_not_look_at_where_rounds_begin(build_engine: Build, drafting: Any) -> None:
    """Preemptions, prompts in pieces and drafts without room begin rounds elsewhere; draws are as without them."""
    wanted = requests({"temperature": 0.9})
    tokens = generate(build_engine(parts={"decoder": drafting}), wanted)
    pressed = build_engine(
        parts={
            "decoder": drafting, "kv": ("paged", {"block_size": 4}),
            "scheduler": ("continuous", {"chunked": True, "max_num_batched_tokens": 7}),
        },
        max_model_len=44,
        kv_memory_bytes=12 * 4 * 2 * 2 * 2 * 16 * 4,
    )  # fmt: skip
    assert generate(pressed, wanted) == tokens
    assert pressed.report().counters["preemptions"] > 0


def test_a_full_draft_kv_goes_on_drafting_for_some(build_engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one long sequence, and seven that grow: those that find none leave theirs to others."""
    budget, room = SecondModel._budget, 16 * 4 * 2 * 2 * 2 * 16 * 4
    monkeypatch.setattr(SecondModel, "_budget", staticmethod(lambda *given: replace(budget(*given), max_bytes=room)))
    wanted = [
        replace(each, sampling=replace(each.sampling, max_new_tokens=24, ignore_eos=True))
        for each in requests({"temperature": 0.9})
    ]
    parts = {"decoder": ("speculative", ROUGH), "kv": ("paged", {"block_size": 4})}
    engine = build_engine(parts=parts, max_model_len=44)
    assert {len(tokens) for tokens in generate(engine, wanted).values()} == {24}
    counters = engine.report().counters
    assert counters["draft_forwards"] > counters["target_forwards"]
    assert counters["draft_tokens"] > counters["verifications"] / 4


def test_pieces_of_prompts_are_not_filled_up(build_engine: Build) -> None:
    """Beside a piece of one token steps cannot be replayed, and what stands behind it is no draft's place."""
    engine = build_engine(
        parts={
            "decoder": ("speculative", ROUGH),
            "scheduler": ("continuous", {"chunked": True, "max_num_batched_tokens": 3}),
        }
    )
    engine._decoder._uniform = True  # as on a GPU
    forward = engine._runner.forward
    seen: list[tuple[bool, bool]] = []

    def watch(plan: Any, *given: Any) -> Any:
        seen.extend((completes(entry), bool(entry.draft_ids)) for entry in plan.entries if entry.num_own_tokens == 1)
        return forward(plan, *given)

    engine._runner.forward = watch
    generate(engine, requests({"temperature": 0.9}))
    assert {(True, True), (False, False)} <= set(seen)
    assert (False, True) not in seen


def test_the_number_of_drafts_changes_no_draw(build_engine: Build) -> None:
    wanted = requests({"temperature": 0.9})

    def drawn(count: int) -> dict[str, list[int]]:
        decoder = ("speculative", {**ROUGH, "num_draft_tokens": count})
        return generate(build_engine(parts={"decoder": decoder}), wanted)

    assert drawn(1) == drawn(3) == drawn(7)


def test_rejection_up_to_the_last_position(build_engine: Build) -> None:
    """Where the context ends the draft has fewer positions than a round would use."""
    long = [
        replace(each, sampling=replace(each.sampling, max_new_tokens=64 - len(each.prompt_ids), ignore_eos=True))
        for each in requests({"temperature": 0.9})
    ]
    drafting = ("speculative", {**ROUGH, "num_draft_tokens": 7})
    tokens = generate(build_engine(parts={"decoder": drafting}, max_model_len=64), long)
    assert all(len(tokens[each.request_id]) == 64 - len(each.prompt_ids) for each in long)
    assert generate(build_engine(parts={"decoder": drafting}, max_model_len=128), long) == tokens


def test_greedy_drafts_up_to_the_last_position(build_engine: Build) -> None:
    """The target as its own draft: every round emits all that it may, also where the context ends in it."""
    long = [
        replace(each, sampling=replace(each.sampling, max_new_tokens=64 - len(each.prompt_ids), ignore_eos=True))
        for each in requests({})
    ]
    engine = build_engine(
        parts={"decoder": ("speculative", {"draft": "target", "num_draft_tokens": 7})}, max_model_len=64
    )
    assert generate(engine, long) == generate(build_engine(max_model_len=64), long)
    rounds = sum(1 + -(-(each.sampling.max_new_tokens - 1) // 8) for each in long)
    assert engine.report().counters["verifications"] == rounds
