"""Draft trees on a GPU: steps with trees are replayed from graphs, and the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import DRAFTING, TREES, generate, requests

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Build = Callable[..., Any]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("attention", ["triton", "sdpa"])
@pytest.mark.parametrize("kv", ["dense", ("paged", {"block_size": 16})], ids=str)
@pytest.mark.parametrize("decoder", [each for each in DRAFTING if each[0] in TREES], ids=lambda each: each[0])
def test_same_tokens_from_graphs(
    build_engine: Build, decoder: Any, kv: Any, attention: str, sampling: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"device": "cuda", "kv_memory_bytes": 1 << 26}
    parts = {"kv": kv, "attention": attention}
    plain = generate(build_engine(parts=parts, **given), requests(sampling))
    engine = build_engine(parts={**parts, "decoder": decoder}, **given)
    assert generate(engine, requests(sampling)) == plain
    report = engine.report()
    assert report.graphs["captured"] > 0
    assert report.counters["graph_steps"] > report.counters["eager_steps"]
    assert report.counters["accepted_draft_tokens"] > 0


@pytest.mark.parametrize("decoder", ["medusa", "eagle"])
def test_training_on_a_gpu(catalogue: Any, tiny_llama: Any, tmp_path: Any, decoder: str) -> None:
    """bf16 base, heads in fp32 under autocast."""
    from infermix.roles.component import Role
    from infermix.roles.training import HeadTraining, OwnOutput
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to("cuda")
    generator = torch.Generator().manual_seed(0)
    texts = [OwnOutput(tuple(torch.randint(6, 96, (20,), generator=generator).tolist()), 4) for _ in range(24)]
    trainer = catalogue.find(Role.DECODER, decoder).component.trainer
    training = HeadTraining(
        model=model.eval().requires_grad_(False), samples=tuple(texts[4:]), held_out=tuple(texts[:4]),
        batch_tokens=200, learning_rate=5e-3, seed=0, output=tmp_path, about={}, share_done=lambda step: step / 40,
    )  # fmt: skip
    figures = trainer.train(trainer.options(), training)
    assert figures["last_loss"] < figures["first_loss"]
