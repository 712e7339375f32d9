"""Masked-diffusion decoding against its own meaning: the paper's loop over the plain model, token for token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import generate
from infermix.engine.attention_check import check_attention_part
from infermix.engine.self_check import self_check
from infermix.errors import Unsupported, UserError, WrongResult
from infermix.roles.engine import ScoreRequest
from infermix.roles.request import Request, SamplingParams
from infermix.toolkit.sampling import uniform
from infermix_reference.attention_sdpa import SdpaAttention
from infermix_reference.kv_none import RecomputeLayout
from infermix_reference.scheduler_continuous import ContinuousScheduler
from llada import MASK, PlainLLaDA, decode, write_llada

Build = Callable[..., Any]
#: Options of the decoder, and of the plain loop.
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one token a step": ({"block_length": 6}, {"block_length": 6}),
    "a block in two steps": ({"block_length": 6, "steps_per_block": 2}, {"block_length": 6, "steps": 2}),
    "uneven steps": ({"block_length": 7, "steps_per_block": 3}, {"block_length": 7, "steps": 3}),
    "a block at once": ({"block_length": 5, "steps_per_block": 1}, {"block_length": 5, "steps": 1}),
    "more steps than tokens": ({"block_length": 4, "steps_per_block": 9}, {"block_length": 4, "steps": 9}),
    "blocks of one token": ({"block_length": 1}, {"block_length": 1}),
    "one block for all": ({"block_length": 64}, {"block_length": 64}),
    "by a threshold": ({"block_length": 8, "threshold": 0.2}, {"block_length": 8, "threshold": 0.2}),
    "never sure": ({"block_length": 8, "threshold": 1.0}, {"block_length": 8, "threshold": 1.0}),
    "always sure": ({"block_length": 8, "threshold": 1e-9}, {"block_length": 8, "threshold": 1e-9}),
}
SCHEDULERS = [
    ("static", {"batch_size": 3}),
    ("continuous", {"max_num_seqs": 3}),
    ("continuous", {"max_num_seqs": 8, "max_num_batched_tokens": 24}),
    ("continuous", {"max_num_seqs": 8, "max_num_batched_tokens": 24, "chunked": True}),
    ("dynamic", {"batch_size": 3, "max_wait_s": 0.0}),
    ("chunked_prefill", {"max_num_batched_tokens": 16, "max_chunk_tokens": 3}),
    ("priority", {"max_num_batched_tokens": 24}),
    ("shortest_first", {"length": "prompt"}),
    ("fair_share", {"weights": {"a": 3.0}, "chunked": True, "max_num_batched_tokens": 16}),
    ("class_budgets", {"budgets": {"a": 1}, "default_budget": 2}),
    ("slo_aware", {"tpot_s": 0.0125, "ttft_s": 0.02, "max_num_batched_tokens": 20}),
]


@pytest.fixture(scope="session")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llada(tmp_path_factory.mktemp("llada"))


@pytest.fixture
def build(build_engine: Build, llada: Path) -> Build:
    def made(options: dict[str, Any], model: Path = llada, **given: Any) -> Any:
        parts = {"kv": "none", "decoder": ("diffusion", options), **given.pop("parts", {})}
        return build_engine(parts=parts, model=model, **given)

    return made


def requests(count: int = 6, **sampling: Any) -> list[Request]:
    rng = random.Random(1)
    return [
        Request(
            request_id=f"r{index}",
            prompt_ids=tuple(rng.randrange(6, MASK) for _ in range(rng.randint(1, 13))),
            sampling=SamplingParams(
                **{"max_new_tokens": rng.randint(1, 23), "seed": index, "ignore_eos": True} | sampling
            ),
        )
        for index in range(count)
    ]


def plainly(llada: Path, wanted: list[Request], **how: Any) -> dict[str, list[int]]:
    model = PlainLLaDA(llada)
    return {each.request_id: decode(model, each.prompt_ids, each.sampling.max_new_tokens, **how) for each in wanted}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_the_tokens_of_the_papers_loop(build: Build, llada: Path, schedule: Any, attention: str) -> None:
    options, how = schedule
    engine, wanted = build(options, parts={"attention": attention}), requests()
    assert generate(engine, wanted) == plainly(llada, wanted, **how)
    counters = engine.report().counters
    assert counters["unmasked_tokens"] == sum(each.sampling.max_new_tokens for each in wanted)
    assert engine._space.usage().used_tokens == 0


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=str)
def test_with_every_scheduler(build: Build, llada: Path, scheduler: Any) -> None:
    wanted = requests(9)
    engine = build({"block_length": 5, "steps_per_block": 3}, parts={"scheduler": scheduler})
    assert generate(engine, wanted) == plainly(llada, wanted, block_length=5, steps=3)


@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.9}, {"temperature": 1.2, "top_k": 7, "repetition_penalty": 1.3}]
)
def test_a_draw_does_not_depend_on_its_company(build: Build, remasking: str, sampling: dict[str, Any]) -> None:
    options = {"block_length": 6, "steps_per_block": 3, "remasking": remasking}
    wanted = requests(**sampling)
    together = generate(build(options), wanted)
    alone = build(options, parts={"scheduler": ("static", {"batch_size": 1})})
    assert generate(alone, list(reversed(wanted))) == together
    others = generate(build(options), requests(**sampling, seed=77))
    assert others != together


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_text_survives_preemption(build: Build, temperature: float) -> None:
    """What was unmasked before a sequence lost its place is there when it comes back."""

    class Preempting(ContinuousScheduler):
        num_calls = 0

        def schedule(self, space: Any, now_s: float) -> Any:
            plan = super().schedule(space, now_s)
            self.num_calls += 1
            if self.num_calls % 3 == 0 and len(plan.entries) > 1:
                self._preempt(plan.entries[-1].sequence, plan, space)
            return plan

    options, wanted = {"block_length": 6, "steps_per_block": 4}, requests(temperature=temperature)
    engine = build(options)
    engine._scheduler = Preempting(4, 2048)
    assert generate(engine, wanted) == generate(build(options), wanted)
    assert engine.report().counters["preemptions"] > 3


def test_random_remasking_by_hand(build: Build, llada: Path) -> None:
    """The noise that ranks predictions is that of seed, position and step, and no token's."""
    (request,) = wanted = requests(1, seed=4, max_new_tokens=11)
    model = PlainLLaDA(llada)
    expected = decode(
        model, request.prompt_ids, 11, block_length=4,
        confidence=lambda position, step: uniform(4, position, (1 << 32) + step),
    )  # fmt: skip
    assert generate(build({"block_length": 4, "remasking": "random"}), wanted)["r0"] == expected
    assert expected != decode(model, request.prompt_ids, 11, block_length=4)


def test_a_sampled_text_by_hand(build: Build, llada: Path) -> None:
    """Each step draws again, with noise of its own, from the distribution of that step."""
    (request,) = wanted = requests(1, seed=9, max_new_tokens=9, temperature=0.8)

    def choose(row: torch.Tensor, position: int, step: int) -> int:
        cumulative = (row / 0.8).softmax(-1).cumsum(-1)
        return int((cumulative <= uniform(9, position, step) * cumulative[-1]).sum())

    expected = decode(PlainLLaDA(llada), request.prompt_ids, 9, block_length=5, steps=2, choose=choose)
    assert generate(build({"block_length": 5, "steps_per_block": 2}), wanted)["r0"] == expected


def test_one_mask_has_the_models_distribution(build: Build, llada: Path) -> None:
    """Chi-square of 20,000 draws of a single mask, tokens expected fewer than five times taken together."""
    prompt, draws = (7, 8, 9), 20_000
    expected = PlainLLaDA(llada)([*prompt, MASK])[3].double()
    expected[MASK] = float("-inf")
    expected = expected.softmax(-1) * draws
    engine = build({"block_length": 4}, max_num_seqs=200, parts={"scheduler": ("static", {"batch_size": 200})})
    sampling = [SamplingParams(max_new_tokens=1, temperature=1.0, seed=seed) for seed in range(draws)]
    found = generate(
        engine, [Request(request_id=str(i), prompt_ids=prompt, sampling=s) for i, s in enumerate(sampling)]
    )
    counts = torch.bincount(torch.tensor([tokens[0] for tokens in found.values()]), minlength=96).double()
    assert counts[MASK] == 0
    rare = expected < 5
    observed, wanted = ([*each[~rare].tolist(), float(each[rare].sum())] for each in (counts, expected))
    statistic = sum((a - b) ** 2 / b for a, b in zip(observed, wanted, strict=True))
    freedom = len(wanted) - 1
    assert freedom > 10
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 8, (statistic, freedom)


def test_a_text_ends_with_its_end(build: Build, llada: Path) -> None:
    """Emitted tokens are final: what the whole loop writes up to the first stop token, and nothing behind it."""
    wanted = requests(8, max_new_tokens=20)
    whole = plainly(llada, wanted, block_length=6)
    stops = tuple({tokens[7] for tokens in whole.values()})
    cut = {
        name: tokens[: next(i for i, token in enumerate(tokens) if token in stops) + 1]
        for name, tokens in whole.items()
    }
    assert any(len(tokens) % 6 for tokens in cut.values())
    assert generate(build({"block_length": 6}), requests(8, max_new_tokens=20, stop_token_ids=stops)) == cut


def test_the_end_of_the_models_own_config(build: Build, llada: Path, tmp_path: Path) -> None:
    """Its end token ends a text where nobody asks to ignore it, but not before `min_new_tokens`."""
    wanted = requests(8, max_new_tokens=12)
    whole = plainly(llada, wanted, block_length=4)
    end = whole["r0"][6]
    ending = {name for name, tokens in whole.items() if end in tokens}
    engine = build({"block_length": 4}, model=write_llada(tmp_path, eos_token_id=end))
    found = generate(engine, requests(8, max_new_tokens=12, ignore_eos=False))
    assert {name for name, tokens in found.items() if tokens[-1] == end} == ending
    assert any(len(tokens) < 12 for tokens in found.values())
    late = generate(engine, requests(8, max_new_tokens=12, ignore_eos=False, min_new_tokens=12))
    assert all(len(tokens) == 12 and end not in tokens for tokens in late.values())


def test_events_say_what_is_final_at_once(build: Build, llada: Path) -> None:
    """Tokens come as soon as no mask is in front of them, and no event is empty."""
    (request,) = requests(1, max_new_tokens=16)
    engine = build({"block_length": 8})
    engine.submit(request)
    events = []
    while engine.has_work:
        events += engine.step()
    assert all(event.token_ids for event in events)
    assert 2 < len(events) <= 16
    assert engine.report().counters["denoising_forwards"] == 16


def test_masks_in_a_prompt_stay(build: Build, llada: Path) -> None:
    (request,) = wanted = [replace(requests(1, max_new_tokens=9)[0], prompt_ids=(7, MASK, 8, MASK))]
    assert generate(build({"block_length": 4}), wanted) == plainly(llada, wanted, block_length=4)
    assert request.prompt_ids == (7, MASK, 8, MASK)


def test_several_outputs(build: Build) -> None:
    """Outputs of one request are those of single requests with their seeds."""
    engine = build({"block_length": 6, "steps_per_block": 2})
    (request,) = requests(1, max_new_tokens=14, num_outputs=3, temperature=0.9)
    engine.submit(request)
    outputs: dict[int, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            outputs.setdefault(event.output, []).extend(event.token_ids)
    assert [len(outputs[index]) for index in range(3)] == [14, 14, 14]
    assert len({tuple(tokens) for tokens in outputs.values()}) == 3
    (first,) = requests(1, max_new_tokens=14, temperature=0.9)
    assert generate(build({"block_length": 6, "steps_per_block": 2}), [first])["r0"] == outputs[0]


def test_a_row_that_predicts_the_next_token(build: Build, tmp_path: Path) -> None:
    """Dream reads the prediction of a mask off the row before it; its files have Qwen2's names."""
    import json

    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=5, initializer_range=0.2,
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    dream = {**saved, "model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": MASK}
    (tmp_path / "config.json").write_text(json.dumps(dream))

    @torch.no_grad()
    def shifted(text: Any) -> torch.Tensor:
        everything = torch.zeros(1, 1, len(text), len(text))
        logits = model(input_ids=torch.tensor([text]), attention_mask=everything).logits[0]
        return torch.cat((logits[:1], logits[:-1]))

    wanted = requests(4)
    engine = build({"block_length": 5, "steps_per_block": 3}, model=tmp_path)
    assert engine.report().executed["decoder"]["shifted_predictions"]
    expected = {
        each.request_id: decode(shifted, each.prompt_ids, each.sampling.max_new_tokens, block_length=5, steps=3)
        for each in wanted
    }
    assert generate(engine, wanted) == expected


def test_a_mask_token_of_the_users(build: Build, tmp_path: Path) -> None:
    """The option stands in for the config, and wins over it."""
    silent, told = write_llada(tmp_path / "silent", mask_token_id=None), write_llada(tmp_path / "told")
    wanted = requests(3)
    expected = plainly(told, wanted, block_length=5, mask=90)
    for model in (silent, told):
        assert generate(build({"block_length": 5, "mask_token_id": 90}, model=model), wanted) == expected
    with pytest.raises(UserError, match=r"mask_token_id: .*its config has no mask_token_id"):
        build({}, model=silent)
    with pytest.raises(UserError, match="96 is not in its vocabulary"):
        build({"mask_token_id": 96})


def test_no_engine_without_the_parts_for_it(build_engine: Build, llada: Path) -> None:
    with pytest.raises(Unsupported, match="needs decoder:unmasks, which decoder 'autoregressive' does not provide"):
        build_engine(parts={"kv": "none"}, model=llada)
    with pytest.raises(Unsupported, match="needs kv:recompute, which kv 'paged' does not provide"):
        build_engine(parts={"decoder": "diffusion"}, model=llada)


def test_logits_are_those_of_the_plain_model(build: Build, llada: Path) -> None:
    """With either attention of transformers', which the self-check measures rounding by."""
    engine, ids = build({}), torch.tensor([7, 8, MASK, 9, MASK, 30])
    plain, joint = PlainLLaDA(llada)(ids.tolist()), engine._joint
    joint.detach()
    for implementation in ("eager", "sdpa"):
        torch.testing.assert_close(joint.reference(ids, 6, implementation), plain, rtol=1e-4, atol=1e-4)
    figures = engine.report().self_check
    assert figures["relative_error"] < figures["tolerance"] <= 1e-4
    assert figures["attention"]["relative_error"] < 1e-5


def test_causal_attention_fails_the_self_check(build: Build) -> None:
    class Causal(SdpaAttention):
        def forward(self, q: Any, view: Any, batch: Any, layer: Any) -> Any:
            return super().forward(q, view, batch, replace(layer, causal=True))

    joint = build({})._joint
    given = {"device": torch.device("cpu"), "dtype": torch.float32}
    joint.detach()
    with pytest.raises(WrongResult, match="packed logits differ"):
        self_check(joint.model, joint, Causal(), RecomputeLayout(), **given)
    with pytest.raises(WrongResult, match="differs from plain attention"):
        check_attention_part(joint, Causal(), RecomputeLayout(), (5, 9), **given)
    assert check_attention_part(joint, SdpaAttention(), RecomputeLayout(), (5, 9), **given)["layers"] == 1


@pytest.mark.parametrize("quantizer", ["rtn", ("int8", {}), ("nf4", {"block_size": 32})], ids=str)
def test_with_quantized_weights(build: Build, quantizer: Any) -> None:
    """Rounded activations included, whose noise the self-check measures without shorter texts."""
    wanted = requests(3)
    found = generate(build({"block_length": 6}, parts={"quantizer": quantizer}), wanted)
    assert [len(found[each.request_id]) for each in wanted] == [each.sampling.max_new_tokens for each in wanted]


def test_no_score_of_such_a_model(build: Build) -> None:
    with pytest.raises(Unsupported, match="no probability of the next one"):
        build({}).score([ScoreRequest((7, 8, 9), first=1)])


def test_no_draft_of_such_a_model(build_engine: Build, llada: Path) -> None:
    with pytest.raises(Unsupported, match="predicts no next token, so it cannot draft"):
        build_engine(parts={"decoder": ("speculative", {"draft": str(llada)})})
