"""Lossless decoders on tiny random models of many families: windows, experts, latents, sinks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoding import DRAFTING, generate, requests
from exactness import check_equal

sys.path.insert(0, str(Path(__file__).parent.parent / "joint"))
from tiny_models import tiny_model

Build = Callable[..., Any]
FAMILIES = ("gpt2", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v2", "phi3", "qwen3", "olmo2", "cohere2")


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_plain_decoding(build_engine: Build, family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    wanted = requests({}, count=12)
    given = {"model": tmp_path, "max_model_len": 64}
    eager = {"attention": "eager"}  # the one that knows soft caps and sinks
    plain = build_engine(eager, **given)
    answers = generate(plain, wanted)
    for name, options in (each for each in DRAFTING if "heads" not in each[1]):  # heads belong to one model
        whole = {"bits": 8, "granularity": "channel"}  # no group size fits the layers of all families
        quantized = {"draft_quantizer_options": whole} if "draft_quantizer" in options else {}
        engine = build_engine({**eager, "decoder": (name, {**options, **quantized})}, **given)
        check_equal(engine, lambda: plain, wanted, answers)
