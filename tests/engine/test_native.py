"""The native engine: the same tokens whatever the parts, the order, the pressure on memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.errors import InfermixError, UserError
from infermix.roles.engine import ScoreRequest
from infermix.roles.request import FinishReason, Request, SamplingParams, Sequence

Build = Callable[..., Any]
PROMPT_LENGTHS = (1, 7, 16, 17, 33, 5, 48)


def prompts(seed: int = 0, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(6, 96) for _ in range(length)) for length in lengths]


def requests(**sampling: Any) -> list[Request]:
    given = {"max_new_tokens": 12, "ignore_eos": True, **sampling}
    return [
        Request(request_id=str(i), prompt_ids=prompt, sampling=SamplingParams(**{**given, "seed": i}))
        for i, prompt in enumerate(prompts())
    ]


def generate(engine: Any, wanted: list[Request]) -> dict[str, list[int]]:
    for request in wanted:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    for _ in range(2000):
        if not engine.has_work:
            return tokens
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    raise AssertionError("the engine did not finish")


@pytest.fixture(scope="session")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    """Greedy tokens of transformers' generate(), one prompt at a time."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager").eval()
    out = {}
    for i, prompt in enumerate(prompts()):
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False,
            pad_token_id=0, eos_token_id=95_000_000,
        )  # fmt: skip
        out[str(i)] = made[0, len(prompt) :].tolist()
    return out


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "kv", ["none", "concat", "dense", ("paged", {"block_size": 4}), ("paged", {"block_size": 16})]
)
@pytest.mark.parametrize("scheduler", [("static", {"batch_size": 3}), "continuous"])
def test_greedy_tokens_equal_generate(
    build_engine: Build, expected: dict[str, list[int]], attention: str, kv: Any, scheduler: Any
) -> None:
    engine = build_engine({"attention": attention, "kv": kv, "scheduler": scheduler})
    assert generate(engine, requests()) == expected


def test_packed_linears_do_not_change_the_tokens(build_engine: Build, expected: dict[str, list[int]]) -> None:
    engine = build_engine(engine={"linears": "packed"})
    assert generate(engine, requests()) == expected
    assert engine.report().executed["engine"]["packed_linears"]["linears"] == 15


def test_preemption_does_not_change_the_tokens(build_engine: Build, expected: dict[str, list[int]]) -> None:
    bytes_per_token = 2 * 2 * (16 + 16) * 4
    engine = build_engine({"kv": ("paged", {"block_size": 4})}, kv_memory_bytes=bytes_per_token * 140)
    assert generate(engine, requests()) == expected
    assert engine.report().counters["preemptions"] > 0


def test_sampled_tokens_do_not_depend_on_company_or_preemption(build_engine: Build) -> None:
    wanted = requests(temperature=1.0, top_p=0.95)
    together = generate(build_engine(), wanted)
    alone = {}
    engine = build_engine({"kv": "dense"})
    for request in wanted:
        alone |= generate(engine, [request])
    pressed = build_engine({"kv": ("paged", {"block_size": 4})}, kv_memory_bytes=2 * 2 * 32 * 4 * 140)
    assert together == alone == generate(pressed, wanted)


def test_late_requests_join_running_ones(build_engine: Build, expected: dict[str, list[int]]) -> None:
    engine, tokens = build_engine(), {}
    for request in requests():
        engine.submit(request)
        tokens[request.request_id] = []
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert tokens == expected


def test_a_stop_token_ends_a_request(build_engine: Build, expected: dict[str, list[int]]) -> None:
    third = expected["4"][3]
    request = Request(
        request_id="4", prompt_ids=prompts()[4], sampling=SamplingParams(max_new_tokens=12, stop_token_ids=(third,))
    )
    engine = build_engine()
    engine.submit(request)
    events = []
    while engine.has_work:
        events += engine.step()
    got = [token for event in events for token in event.token_ids]
    assert got == expected["4"][: expected["4"].index(third) + 1]
    assert events[-1].finish_reason is FinishReason.STOP


class ByteTokenizer:
    """One token per byte."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id = None
    vocab_size = 256

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize("stop", ["\N{LLAMA}" * 5, "b" + "\N{LLAMA}" * 5])
def test_a_stop_string_may_span_more_tokens_than_characters(build_engine: Build, stop: str) -> None:
    engine = build_engine()
    engine.tokenizer = ByteTokenizer()
    output = list(("aaaaaaaab" + "\N{LLAMA}" * 5).encode())
    request = Request(request_id="0", prompt_ids=(1,), sampling=SamplingParams(stop=(stop,)))
    sequence = Sequence(0, request, [1, *output], 1)
    assert engine._hits_stop_string(sequence)


def test_length_ends_a_request_and_frees_everything(build_engine: Build) -> None:
    engine = build_engine()
    generate(engine, requests())
    assert engine._space.usage().allocated_tokens == 0
    assert len(engine._lanes._free) == engine._lanes.count


@pytest.mark.parametrize("kv", ["none", "concat", "dense", ("paged", {"block_size": 4})])
@pytest.mark.parametrize("protocol", ["prefill", "decode"])
def test_scores_equal_the_full_forward(build_engine: Build, tiny_llama: Path, kv: Any, protocol: str) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager").eval()
    texts = prompts(3, (30, 12, 45, 2, 22, 9, 11, 60, 31, 8))
    engine = build_engine({"kv": kv})
    scores = engine.score(
        [ScoreRequest(text, first=max(1, len(text) // 3), protocol=protocol, want_logits=True) for text in texts]
    )
    for text, score in zip(texts, scores, strict=True):
        first = max(1, len(text) // 3)
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, first - 1 : -1]
        wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(text[first:])[:, None])[:, 0]
        assert torch.allclose(torch.tensor(score.logprobs), wanted, atol=1e-4)
        assert score.top1 == logits.argmax(-1).tolist()
        assert torch.allclose(score.logits, logits, atol=1e-3)
    assert engine._space.usage().allocated_tokens == 0


def test_score_refuses_a_busy_engine(build_engine: Build) -> None:
    engine = build_engine()
    engine.submit(requests()[0])
    with pytest.raises(InfermixError, match="idle"):
        engine.score([ScoreRequest((1, 2, 3))])


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ((), 1, "empty prompt"),
        ((7,) * 120, 20, "140 tokens"),
        ((96,), 1, "vocabulary has 96"),
        ((-1,), 1, "token id -1"),
    ],
)
def test_misfits_are_refused_with_the_reason(
    build_engine: Build, prompt: tuple[int, ...], new: int, message: str
) -> None:
    engine = build_engine()
    with pytest.raises(UserError, match=message):
        engine.submit(Request(request_id="r", prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=new)))
    assert not engine.has_work


def test_reset_drops_everything(build_engine: Build, expected: dict[str, list[int]]) -> None:
    engine = build_engine()
    for request in requests():
        engine.submit(request)
    engine.step()
    engine.reset()
    assert not engine.has_work
    assert generate(engine, requests()) == expected


def test_the_report_names_what_ran(build_engine: Build) -> None:
    report = build_engine({"kv": ("paged", {"block_size": 4})}).report()
    assert report.executed["attention"]["class"].endswith("SdpaAttention")
    assert report.executed["kv"]["block_size"] == 4
    assert report.kv_bytes_per_token == 2 * 2 * (16 + 16) * 4
    assert report.self_check
    assert set(report.setup_s) >= {"load", "quantize", "allocate", "self_check", "capture"}
