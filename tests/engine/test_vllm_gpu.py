"""The real vLLM: the same weights give the same tokens and log-probabilities as transformers. Needs a GPU."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.roles.engine import EngineContext, ScoreRequest
from infermix.roles.request import FinishReason, Request, SamplingParams
from infermix.spec.experiment import ModelSource
from infermix_vllm.plugin import VllmOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
PROMPTS = [(10, 20, 30, 40, 50), (60,), (70, 80, 90)]
#: Greedy tokens may part only where the two likeliest logits are this close (bfloat16 has 8 bits).
TIE = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Random, with sharp logits, in the head width that FlashAttention takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=5, bos_token_id=1, initializer_range=0.1,
        tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    loaded = LlamaForCausalLM(config).to(torch.bfloat16)
    loaded.save_pretrained(folder)
    return folder, loaded.to("cuda").eval()


@pytest.fixture(scope="module")
def engine(model: tuple[Path, Any]) -> Any:
    from infermix_vllm.build import build_engine

    source = resolve_source(ModelSource(source=str(model[0])), Path())
    facts = read_model_facts(source, dtype="bfloat16", dummy=False)
    context = EngineContext(
        source=source, facts=facts, machine=machine_facts("cuda"), dtype="bfloat16", parts={}, max_model_len=128,
        max_num_seqs=4, seed=0, clock_ns=time.perf_counter_ns, kv_memory_bytes=2**28,
    )  # fmt: skip
    built = build_engine(VllmOptions(enforce_eager=True), context)
    yield built
    built.close()


@torch.no_grad()
def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens], device="cuda"), use_cache=False).logits[0].float()


def run(engine: Any, *requests: Request) -> dict[str, Any]:
    outputs: dict[str, Any] = {each.request_id: [[], None] for each in requests}
    for each in requests:
        engine.submit(each)
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id][0] += event.token_ids
            outputs[event.request_id][1] = event.finish_reason
    return outputs


def test_greedy_tokens_are_the_models(engine: Any, model: tuple[Path, Any]) -> None:
    requests = [
        Request(request_id=str(i), prompt_ids=p, sampling=SamplingParams(max_new_tokens=12, ignore_eos=True))
        for i, p in enumerate(PROMPTS)
    ]
    for each in requests * 2:  # the second time after a reset
        engine.reset()
        tokens, reason = run(engine, each)[each.request_id]
        assert (len(tokens), reason) == (12, FinishReason.LENGTH)
        rows = logits(model[1], [*each.prompt_ids, *tokens])[len(each.prompt_ids) - 1 : -1]
        chosen = rows[torch.arange(12), torch.tensor(tokens, device="cuda")]
        assert (rows.amax(-1) - chosen).max() <= TIE
    assert [reason for _, reason in run(engine, *requests).values()] == [FinishReason.LENGTH] * 3


def test_stop_tokens_end_with_the_token(engine: Any) -> None:
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    tokens = run(engine, Request(request_id="a", prompt_ids=PROMPTS[0], sampling=sampling))["a"][0]
    stopping = SamplingParams(max_new_tokens=12, ignore_eos=True, stop_token_ids=(tokens[3],))
    found = run(engine, Request(request_id="b", prompt_ids=PROMPTS[0], sampling=stopping))["b"]
    assert found == [tokens[: tokens.index(tokens[3]) + 1], FinishReason.STOP]


def test_a_seed_fixes_a_draw(engine: Any) -> None:
    def draw(name: str, seed: int) -> list[int]:
        sampling = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=1.0, seed=seed)
        return run(engine, Request(request_id=name, prompt_ids=PROMPTS[0], sampling=sampling))[name][0]

    assert draw("a", 1) == draw("b", 1)
    assert draw("c", 2) != draw("d", 1)


def test_scores_are_the_models(engine: Any, model: tuple[Path, Any]) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(6, 500, (100,)).tolist()
    (score,) = engine.score([ScoreRequest(tuple(tokens), 10)])
    rows = logits(model[1], tokens)[9:-1].log_softmax(-1)
    expected = rows[torch.arange(90), torch.tensor(tokens[10:], device="cuda")]
    assert score.logprobs == pytest.approx(expected.tolist(), abs=0.15)
    assert torch.tensor(score.logprobs).mean() == pytest.approx(float(expected.mean()), abs=0.01)
    agree = (torch.tensor(score.top1, device="cuda") == rows.argmax(-1)).float().mean()
    assert agree >= 0.95


def test_facts_are_filled(engine: Any, model: tuple[Path, Any]) -> None:
    report = engine.report()
    executed = report.executed["engine"]
    assert executed["class"] == "LlamaForCausalLM"
    assert executed["attention"]
    assert executed["num_blocks"] > 0
    assert report.weight_bytes == sum(parameter.nbytes for parameter in model[1].parameters())
    assert report.kv_bytes is not None
    assert 0.9 * 2**28 <= report.kv_bytes <= 2**28
    # What vLLM holds beside the blocks that sequences can have counts too: 1,143 bytes on one H200.
    shape = 2 * 2 * 2 * 64 * 2
    assert report.kv_bytes_per_token is not None
    assert shape <= report.kv_bytes_per_token <= 1.2 * shape
    json.dumps(executed)
