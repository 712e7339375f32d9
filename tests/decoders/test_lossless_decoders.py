"""Decoders that draft give exactly the tokens of plain decoding, whatever runs beside a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from decoding import DRAFTING, TREES, generate, requests
from infermix.errors import Unsupported
from infermix.roles.request import Request, SamplingParams

Build = Callable[..., Any]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.01},
    "sampled": {"temperature": 0.7},
    "filtered": {"temperature": 1.1, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "minimum": {"min_new_tokens": 9, "stop_token_ids": tuple(range(40, 70))},
}
LAYOUTS = [("none", {}), ("concat", {}), ("dense", {}), ("paged", {"block_size": 4})]
LAYOUTS.append(("paged", {"block_size": 4, "prefix_cache": "radix"}))
SCHEDULERS = [
    ("static", {"batch_size": 3}),
    ("continuous", {"max_num_seqs": 3}),
    ("continuous", {"max_num_seqs": 4, "max_num_batched_tokens": 9, "chunked": True}),
]


def _name(decoder: Any) -> str:
    return decoder[0] + ("-adaptive" if decoder[1].get("adaptive") else "")


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("decoder", DRAFTING, ids=_name)
def test_same_tokens_as_plain_decoding(build_engine: Build, decoder: Any, sampling: dict[str, Any]) -> None:
    plain = generate(build_engine(), requests(sampling))
    engine = build_engine(parts={"decoder": decoder})
    assert generate(engine, requests(sampling)) == plain
    counters = engine.report().counters
    assert counters["accepted_draft_tokens"] > 0
    assert counters["verified_tokens"] >= sum(map(len, plain.values()))


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda each: "-".join(map(str, (each[0], *each[1].values()))))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each[0])
@pytest.mark.parametrize("decoder", DRAFTING, ids=_name)
def test_with_every_layout_and_scheduler(build_engine: Build, decoder: Any, layout: Any, scheduler: Any) -> None:
    if layout[0] == "none" and decoder[0] in TREES:
        with pytest.raises(Unsupported, match="kv:move"):
            build_engine(parts={"decoder": decoder, "kv": layout})
        return
    sampling = {"temperature": 0.8}
    plain = generate(build_engine(), requests(sampling))
    engine = build_engine(parts={"decoder": decoder, "kv": layout, "scheduler": scheduler})
    assert generate(engine, requests(sampling)) == plain


@pytest.mark.parametrize(
    "kv", ["quantized", ("kivi", {"group_size": 8, "residual_length": 16, "block_size": 8})], ids=str
)
@pytest.mark.parametrize(
    "decoder", [("speculative", {"draft": "target"}), ("self_speculative", {"skip_layers": [1]})]
)
def test_a_draft_model_may_have_quantized_kv(build_engine: Build, decoder: Any, kv: Any) -> None:
    """Its self-check allows for what the layout says it loses, as that of the target does."""
    engine = build_engine(parts={"decoder": decoder, "kv": kv})
    assert all(generate(engine, requests({})).values())
    assert engine.report().counters["accepted_draft_tokens"] > 0


@pytest.mark.parametrize("decoder", DRAFTING, ids=_name)
def test_under_preemption(build_engine: Build, decoder: Any) -> None:
    """A pool of 11 blocks for seven requests: sequences lose their KV and start over."""
    wanted = requests({"temperature": 0.8})
    plain = generate(build_engine(), wanted)
    engine = build_engine(
        parts={"decoder": decoder, "kv": ("paged", {"block_size": 4}), "scheduler": "continuous"},
        max_model_len=44,
        kv_memory_bytes=12 * 4 * 2 * 2 * 2 * 16 * 4,
    )
    assert generate(engine, wanted) == plain
    assert engine.report().counters["preemptions"] > 0


@pytest.mark.parametrize("decoder", DRAFTING, ids=_name)
def test_all_kv_comes_back(build_engine: Build, decoder: Any) -> None:
    engine = build_engine(parts={"decoder": decoder, "kv": ("paged", {"block_size": 4})})
    generate(engine, requests({}))
    assert engine._space.usage().allocated_tokens == 0


@pytest.mark.parametrize("decoder", DRAFTING, ids=_name)
def test_fewer_forwards_than_tokens(build_engine: Build, decoder: Any) -> None:
    """Greedy text of a small model repeats itself in places: some forwards give several tokens."""
    engine = build_engine(parts={"decoder": decoder}, max_model_len=200)
    request = Request(
        request_id="r", prompt_ids=(7, 8, 9) * 3, sampling=SamplingParams(max_new_tokens=120, ignore_eos=True)
    )
    assert len(generate(engine, [request])["r"]) == 120
    assert engine.report().counters["target_forwards"] < 119


def test_a_layout_that_cannot_cut_is_refused_by_the_plan(catalogue: Any) -> None:
    from infermix.roles.component import Role
    from infermix.toolkit.conformance import example_machine, example_model

    component = catalogue.find(Role.DECODER, "prompt_lookup").component
    assert "kv:truncate" in component.needs(component.options(), example_model(), example_machine("cpu"))


def test_a_quantized_draft_counts_as_what_it_takes(build_engine: Build) -> None:
    """Its cost against the target, and the record, go by the bytes that are there, not by the checkpoint's."""
    plain = build_engine(parts={"decoder": ("speculative", {"draft": "target"})})
    quantized = build_engine(parts={"decoder": ("speculative", {"draft": "target", "draft_quantizer": "rtn"})})
    full, small = (each.report().executed["decoder"] for each in (plain, quantized))
    assert full["draft_weight_bytes"] == plain.report().weight_bytes
    assert small["draft_weight_bytes"] < full["draft_weight_bytes"]
    assert small["draft_kv_bytes"] == full["draft_kv_bytes"] > 0


def test_the_cost_ratio_is_of_weights_as_they_are_held(build_engine: Build) -> None:
    """A quantized target is cheaper: the same draft costs more of its forwards."""
    draft = ("speculative", {"draft": "target"})
    ratios = []
    for quantizer in ("none", "rtn"):
        engine = build_engine(parts={"decoder": draft, "quantizer": quantizer})
        ratios.append(engine._decoder._length._cost_ratio)
        assert ratios[-1] == pytest.approx(
            engine.report().executed["decoder"]["draft_weight_bytes"] / engine.report().weight_bytes
        )
    assert ratios[0] == 1.0 < ratios[1]
