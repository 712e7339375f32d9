"""A stated number of drafts stays, whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from decoding import generate
from infermix.roles.request import Request, SamplingParams
from infermix_decoders.draft_length import expected_tokens
from infermix_decoders.options import SyntheticOptions
from infermix_decoders.synthetic_acceptance import acceptance_for

Build = Callable[..., Any]


@pytest.mark.parametrize(("mean", "drafts"), [(1.0, 4), (3.0, 7), (2.5, 3), (8.0, 7)])
def test_acceptance_gives_the_mean(mean: float, drafts: int) -> None:
    assert expected_tokens(acceptance_for(mean, drafts), drafts) == pytest.approx(mean, abs=1e-6)


def test_tokens_per_forward(build_engine: Build) -> None:
    engine = build_engine(parts={"decoder": ("synthetic_acceptance", {"tokens_per_forward": 3.0})}, max_model_len=256)
    requests = [
        Request(
            request_id=str(seed), prompt_ids=(7 + seed,),
            sampling=SamplingParams(max_new_tokens=200, ignore_eos=True, seed=seed),
        )
        for seed in range(6)
    ]  # fmt: skip
    found = generate(engine, requests)
    assert {len(tokens) for tokens in found.values()} == {200}
    counters = engine.report().counters
    assert counters["verified_tokens"] / counters["verifications"] == pytest.approx(3.0, rel=0.1)


def test_more_than_the_drafts_give() -> None:
    with pytest.raises(msgspec.ValidationError, match="at most 4 tokens per forward"):
        msgspec.convert({"num_draft_tokens": 3, "tokens_per_forward": 4.5}, SyntheticOptions)


def test_it_says_that_it_changes_outputs(catalogue: Any) -> None:
    from infermix.roles.component import Role

    component = catalogue.find(Role.DECODER, "synthetic_acceptance").component
    assert not component.lossless(component.options())
