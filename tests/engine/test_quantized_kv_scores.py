"""Scores while decoding read the quantized cache: what is wrong in it shows, what is right costs little."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from infermix.roles.engine import ScoreRequest
from infermix.roles.kv_store import QuantizedPagedView

PARTS = {
    "int8": ("quantized", {"dtype": "int8"}),
    "fp8": ("quantized", {"dtype": "fp8"}),
    "int4": ("kivi", {"bits": 4, "group_size": 8, "residual_length": 16, "block_size": 16}),
    "int2": ("kivi", {"bits": 2, "group_size": 8, "residual_length": 16, "block_size": 16}),
}
#: Mean KL in nats that a tiny random model with sharp logits may lose.
KL = {"int8": 3e-3, "fp8": 0.06, "int4": 0.3, "int2": 3.0}


def _logits(engine: Any, protocol: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    texts = [torch.randint(96, (length,), generator=generator).tolist() for length in (90, 61, 33)]
    scores = engine.score([ScoreRequest(tuple(text), 1, protocol, want_logits=True) for text in texts])
    return torch.cat([score.logits for score in scores])


def _kl(expected: torch.Tensor, seen: torch.Tensor) -> float:
    left, right = expected.double().log_softmax(-1), seen.double().log_softmax(-1)
    return float((left.exp() * (left - right)).sum(-1).mean())


@pytest.mark.parametrize("name", PARTS)
def test_decoding_reads_the_quantized_cache(build_engine: Callable[..., Any], name: str) -> None:
    exact = _logits(build_engine({"kv": "paged"}), "decode")
    seen = _logits(build_engine({"kv": PARTS[name]}), "decode")
    kl = _kl(exact, seen)
    assert 0 < kl < KL[name]
    assert not torch.equal(exact, seen)


def test_a_broken_dequantization_shows(build_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    exact = _logits(build_engine({"kv": "paged"}), "decode")
    engine = build_engine({"kv": PARTS["int8"]})
    right = _kl(exact, _logits(engine, "decode"))
    gather = QuantizedPagedView._gather
    monkeypatch.setattr(QuantizedPagedView, "_gather", lambda *given: gather(*given) * 1.1)
    wrong = _kl(exact, _logits(engine, "decode"))
    assert wrong > 10 * right


@pytest.mark.parametrize("name", PARTS)
def test_chunked_and_mixed_steps_agree_with_single_tokens(build_engine: Callable[..., Any], name: str) -> None:
    """Tokens written in one pass and one by one end in the same cache: the last row of both protocols agrees."""
    engine = build_engine({"kv": PARTS[name]})
    text = tuple(torch.randint(96, (70,), generator=torch.Generator().manual_seed(3)).tolist())
    prefill, decode = (
        engine.score([ScoreRequest(text, len(text) - 1, protocol, want_logits=True)])[0].logits
        for protocol in ("prefill", "decode")
    )
    assert math.isfinite(float(prefill.abs().max()))
    assert _kl(prefill, decode) < KL[name]


@pytest.mark.parametrize("name", PARTS)
def test_the_record_says_what_a_token_costs(build_engine: Callable[..., Any], name: str) -> None:
    paged, quantized = build_engine({"kv": "paged"}).report(), build_engine({"kv": PARTS[name]}).report()
    assert quantized.kv_bytes_per_token < 0.5 * paged.kv_bytes_per_token
    assert quantized.kv_bytes > 0
    assert quantized.self_check["attention"]["kv_error"] > 0
