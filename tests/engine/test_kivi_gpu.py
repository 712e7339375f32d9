"""The engine over 4- and 2-bit KV with Triton attention: decode steps from graphs, tokens of the gathered way."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.roles.request import Request, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "joint"))
from tiny_models import VOCAB, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
Build = Callable[..., Any]
NUM_REQUESTS = 12


def tokens_of(engine: Any) -> list[list[int]]:
    """Requests of many lengths that join while others decode, across many flushed groups."""
    rng, tokens = random.Random(0), {}
    for number in range(NUM_REQUESTS):
        prompt = tuple(rng.randrange(6, VOCAB) for _ in range(rng.randrange(1, 65)))
        sampling = SamplingParams(max_new_tokens=rng.randrange(20, 60), ignore_eos=True)
        engine.submit(Request(request_id=str(number), prompt_ids=prompt, sampling=sampling))
        tokens[str(number)] = []
        take(engine, tokens)
    while engine.has_work:
        take(engine, tokens)
    return list(tokens.values())


def take(engine: Any, tokens: dict[str, list[int]]) -> None:
    for event in engine.step():
        tokens[event.request_id] += event.token_ids


@pytest.mark.parametrize("bits", [4, 2])
def test_the_tokens_of_the_gathered_way(build_engine: Build, tmp_path: Path, bits: int) -> None:
    """Rounding differs between the two, so that now and then a number lands on the other side of a half step."""
    tiny_model("llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32).save_pretrained(
        tmp_path
    )
    kv = ("kivi", {"bits": bits, "group_size": 16, "residual_length": 48, "block_size": 32})
    given: dict[str, Any] = {"model": tmp_path, "device": "cuda", "max_num_seqs": 5, "kv_memory_bytes": 1 << 26}
    gathered = tokens_of(build_engine({"attention": "sdpa", "kv": kv}, **given))
    engine = build_engine({"attention": "triton", "kv": kv}, **given)
    seen = tokens_of(engine)
    report = engine.report()
    assert report.graphs["captured"] > 0, report.graphs
    assert report.counters["graph_steps"] > 0
    equal = sum(left == right for left, right in zip(seen, gathered, strict=True))
    assert equal >= NUM_REQUESTS - 2
