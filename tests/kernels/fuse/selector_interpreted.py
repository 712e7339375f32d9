"""Tokens picked by kernels under Triton's interpreter: run in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fuse_models import FUSED, tiny, transform_context
from infermix.errors import Unsupported, WrongResult
from infermix.roles.decoder import Forward
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix.toolkit.sampling import TokenSampler, TorchSelector
from infermix_triton.selector import TritonSamplingTransform, TritonSelector

torch.set_num_threads(1)
VOCAB, ROWS = 300, 5
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=1.2, top_k=9, seed=2),
    SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02, seed=3),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, seed=4),
]


def sample(selector: object, rows: list[SamplingParams], logits: torch.Tensor) -> list[int]:
    sequences = [
        Sequence(lane, Request(request_id=str(lane), prompt_ids=(3, 4), sampling=params), [3, 4], 2, lane=lane)
        for lane, params in enumerate(rows)
    ]
    sampler = TokenSampler(ROWS, VOCAB, torch.device("cpu"), (), selector)  # type: ignore[arg-type]
    return sampler.sample(Forward(logits, sequences, torch.arange(len(rows)))).tolist()


@pytest.mark.parametrize(
    "rows", [SAMPLINGS, SAMPLINGS[:1] * ROWS, SAMPLINGS[1:2] * ROWS], ids=["mixed", "greedy", "plain"]
)
def test_the_sampler_gets_the_same_tokens(rows: list[SamplingParams]) -> None:
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    assert sample(TritonSelector(ROWS, VOCAB), rows, logits) == sample(TorchSelector(), rows, logits)


def test_more_rows_than_a_step_has_get_memory_of_their_own() -> None:
    logits = torch.randn(2 * ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    selector = TritonSelector(ROWS, VOCAB)
    assert selector._room(logits) is None
    assert selector._room(logits[:ROWS]) is selector._room(logits[:1]) is not None


def test_the_transform_brings_a_selector_that_it_has_checked() -> None:
    transform = TritonSamplingTransform()
    assert transform.selector is None
    report = transform.apply(tiny(*FUSED["llama"]), transform_context())
    assert report.replaced == {"greedy choice": 1, "filtered draw": 1}
    assert isinstance(transform.selector, TritonSelector)


def test_a_wrong_choice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonSelector, "greedy", lambda self, logits: logits.argmin(-1))
    with pytest.raises(WrongResult, match="greedy choice"):
        TritonSamplingTransform().apply(tiny(*FUSED["llama"]), transform_context())


def test_a_wrong_draw_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonSelector, "draw", lambda self, logits, filters: logits.argmin(-1))
    with pytest.raises(WrongResult, match="draws from random logits"):
        TritonSamplingTransform().apply(tiny(*FUSED["llama"]), transform_context())


def test_a_vocabulary_beyond_the_kernels_is_refused() -> None:
    context = transform_context()
    context = replace(context, facts=replace(context.facts, vocab_size=1 << 19))
    with pytest.raises(Unsupported, match="a vocabulary of 524288, the kernels cover 262144"):
        TritonSamplingTransform().apply(tiny(*FUSED["llama"]), context)
