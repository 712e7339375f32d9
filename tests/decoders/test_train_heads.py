"""Draft heads trained on a model's own output guess more of it than untrained ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import generate
from draft_heads import write_eagle, write_medusa
from infermix.engine.self_output import own_outputs
from infermix.roles.component import Role
from infermix.roles.request import Request, SamplingParams
from infermix.roles.training import HeadTraining, OwnOutput
from infermix_decoders.train_loop import as_batch, batches
from infermix_decoders.train_medusa import pairs

Build = Callable[..., Any]
STEPS = 60


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_llama, attn_implementation="sdpa").eval().requires_grad_(False)


def prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(6, 96) for _ in range(rng.randint(2, 6))) for _ in range(count)]


@pytest.fixture
def texts(build_engine: Build) -> list[OwnOutput]:
    return own_outputs(build_engine(), prompts(60, 1), max_new_tokens=40)


def test_own_output_is_the_models(model: Any, texts: list[OwnOutput]) -> None:
    """A text ends with the token that ends it."""
    assert len(texts) == 60
    for text in texts[::17]:
        ids = torch.tensor([text.token_ids])
        said = model(ids).logits[0].argmax(-1)
        output = slice(text.num_prompt_tokens, len(text.token_ids))
        assert said[text.num_prompt_tokens - 1 : -1].tolist() == list(text.token_ids[output])
        assert 5 not in text.token_ids[text.num_prompt_tokens : -1]


def test_pairs_stay_inside_the_output_of_one_text() -> None:
    batch = as_batch([OwnOutput((1, 2, 3, 4, 5), 2), OwnOutput((1, 2, 3), 1)], torch.device("cpu"))
    assert batch.output.tolist() == [[False, True, True, True, False], [True, True, False, False, False]]
    (text, place), target = pairs(batch.output, 2)
    assert (text.tolist(), place.tolist(), target.tolist()) == ([0], [1], [2])
    (text, place), target = pairs(batch.output, 1)
    assert list(zip(text.tolist(), place.tolist(), target.tolist(), strict=True)) == [(0, 1, 1), (0, 2, 2), (1, 0, 4)]


def test_batches_hold_what_fits() -> None:
    made = [OwnOutput(tuple(range(length)), 1) for length in (3, 9, 4, 30, 2)]
    source = batches(made, 20, seed=0)
    seen = [next(source) for _ in range(12)]
    assert {len(text.token_ids) for batch in seen for text in batch} == {3, 9, 4, 30, 2}
    assert all(len(batch) == 1 or max(len(t.token_ids) for t in batch) * len(batch) <= 20 for batch in seen)


def mean_acceptance_length(build_engine: Build, decoder: str, folder: Path) -> float:
    engine = build_engine(parts={"decoder": (decoder, {"heads": str(folder), "num_draft_tokens": 6})})
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    wanted = [
        Request(request_id=str(index), prompt_ids=prompt, sampling=sampling)
        for index, prompt in enumerate(prompts(60, 1)[10:16])
    ]
    generate(engine, wanted)
    counters = engine.report().counters
    return counters["verified_tokens"] / counters["verifications"]


@pytest.mark.parametrize("decoder", ["medusa", "eagle"])
def test_a_few_steps_help(
    build_engine: Build, catalogue: Any, model: Any, texts: list[OwnOutput], tmp_path: Path, decoder: str
) -> None:
    trainer = catalogue.find(Role.DECODER, decoder).component.trainer
    training = HeadTraining(
        model=model, samples=tuple(texts[4:]), held_out=tuple(texts[:4]), batch_tokens=512, learning_rate=5e-3,
        seed=0,
        output=tmp_path / "trained", about={}, share_done=lambda step: step / STEPS,
    )  # fmt: skip
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    figures = trainer.train(trainer.options(), training)
    assert figures["steps"] == STEPS
    assert figures["last_loss"] < 0.9 * figures["first_loss"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "the base is frozen"
    if decoder == "medusa":
        write_medusa(tmp_path / "untrained", width=64, vocab_size=96)
    else:
        write_eagle(tmp_path / "untrained", width=64)
    names = ("untrained", "trained")
    untrained, trained = (mean_acceptance_length(build_engine, decoder, tmp_path / name) for name in names)
    assert trained > untrained + 0.1
