"""Drafts behind prompts that are longer than a layout takes in one forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoding import DRAFTING, TREES, generate, requests

sys.path.insert(0, str(Path(__file__).parent.parent / "joint"))
from tiny_models import tiny_model

Build = Callable[..., Any]
ONE_LINE = [each for each in DRAFTING if each[0] not in TREES and each[0] != "self_speculative"]


@pytest.mark.parametrize("decoder", ONE_LINE, ids=lambda each: each[0])
def test_a_prompt_in_pieces_with_drafts(build_engine: Build, tmp_path: Path, decoder: Any) -> None:
    """Rings of blocks take six tokens at once; prompts have up to 17, and two decoders draft behind them at once."""
    tiny_model("gemma3_text", vocab_size=96, eos_token_id=5, initializer_range=0.3).save_pretrained(tmp_path)
    wanted = requests({"temperature": 0.8})
    given = {"model": tmp_path, "max_model_len": 64}
    plain = generate(build_engine({"attention": "eager"}, **given), wanted)
    name, options = decoder
    quantized = {"draft_quantizer_options": {"bits": 8, "granularity": "channel"}} if name == "speculative" else {}
    ring = ("hybrid", {"block_size": 4, "max_chunk_tokens": 6})
    engine = build_engine({"attention": "eager", "kv": ring, "decoder": (name, {**options, **quantized})}, **given)
    assert generate(engine, wanted) == plain
    assert engine.report().counters["draft_tokens"] > 0
