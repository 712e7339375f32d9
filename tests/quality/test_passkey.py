"""The passkey check: prompts of the asked length with the key at the asked depth, and answers judged strictly."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import torch
from infermix.errors import UserError
from infermix.quality.components import PasskeyOptions
from infermix.quality.passkey import PasskeyEvaluator, first_number

OFFSET = 3  # of the byte tokenizer


def reader(memory: int, tokenizer: Any) -> Any:
    """Next-token logits of a model that copies the key from the last `memory` tokens before the question."""

    def next_logits(tokens: tuple[int, ...]) -> torch.Tensor:
        text = tokenizer.decode(tokens)
        prompt, answer = text[: text.rindex("The pass key is") + 15], text[text.rindex("The pass key is") + 15 :]
        found = re.search(r"the pass key is (\d+)", prompt[-memory:])
        wanted = f" {found.group(1) if found else 'lost'}."
        logits = torch.zeros(tokenizer.vocab_size)
        logits[ord(wanted[min(len(answer), len(wanted) - 1)]) + OFFSET] = 1.0
        return logits

    return next_logits


@pytest.fixture
def ask(table_engine: Any, byte_tokenizer: Any, evaluator_context: Any) -> Any:
    def run(memory: int, **options: Any) -> tuple[Any, Any]:
        engine = table_engine(reader(memory, byte_tokenizer))
        submitted: list[Any] = []
        submit = engine.submit
        engine.submit = lambda request: (submitted.append(request), submit(request))
        found = PasskeyEvaluator(PasskeyOptions(**options), evaluator_context()).evaluate(engine)
        return found, submitted

    return run


def test_a_model_that_remembers_everything_answers_everything(ask: Any) -> None:
    found, _ = ask(10_000, lengths=(600, 1200), depths=(0.0, 0.5, 1.0), trials=2)
    whole, short, long = found
    assert whole.name == "passkey_accuracy[plain,lengths=600+1200,depths=0+0.5+1,trials=2,digits=5]"
    assert short.name == "passkey_accuracy[plain,lengths=600,depths=0+0.5+1,trials=2,digits=5]"
    assert [metric.value for metric in found] == [1.0, 1.0, 1.0]
    assert whole.samples == short.samples + long.samples == [1.0] * 12
    assert whole.stderr == 0
    assert whole.details["failures"] == []


def test_a_short_memory_finds_only_what_is_near_the_end(ask: Any) -> None:
    (metric,), _ = ask(400, lengths=(1000,), depths=(0.0, 0.5, 1.0), trials=3)
    assert metric.details["accuracy"] == {"1000": {"0": 0.0, "0.5": 0.0, "1": 1.0}}
    assert metric.value == pytest.approx(1 / 3)
    assert metric.details["failures"][0]["answer"].startswith(" lost")


@pytest.mark.parametrize("length", [450, 777, 2000])
def test_prompts_are_as_long_as_asked_and_no_longer(ask: Any, length: int) -> None:
    _, submitted = ask(10_000, lengths=(length,), depths=(0.3,), trials=2, new_tokens=20)
    for request in submitted:
        assert length - 20 - 120 < len(request.prompt_ids) <= length - 20
        assert request.sampling.max_new_tokens == 20


def test_the_key_stands_at_its_depth_and_nowhere_else(ask: Any, byte_tokenizer: Any) -> None:
    _, submitted = ask(10_000, lengths=(3000,), depths=(0.0, 0.5, 1.0), trials=1)
    places = []
    for request in submitted:
        text = byte_tokenizer.decode(request.prompt_ids)
        (key,) = set(re.findall(r"\d+", text))
        assert len(key) == 5
        places.append(text.index(key) / len(text))
    assert places[0] < 0.05 < 0.45 < places[1] < 0.55 < 0.9 < places[2]


def test_keys_depend_on_the_seed_alone(ask: Any) -> None:
    prompts = [
        [request.prompt_ids for request in ask(10_000, lengths=(600,), trials=2, seed=seed)[1]] for seed in (0, 0, 1)
    ]
    assert prompts[0] == prompts[1] != prompts[2]
    assert len(set(prompts[0])) == len(prompts[0])


@pytest.mark.parametrize(
    ("answer", "number"), [(" 12345.", "12345"), (" 123456", "123456"), ("lost", None), (" 99, not 12345", "99")]
)
def test_the_first_number_counts(answer: str, number: str | None) -> None:
    assert first_number(answer) == number


def test_too_short_a_length_is_an_error(ask: Any) -> None:
    with pytest.raises(UserError, match=r"length.*no room for any filler \(the shortest is \d+\)"):
        ask(10_000, lengths=(100,))


def test_a_model_without_a_chat_template_is_an_error(ask: Any) -> None:
    with pytest.raises(UserError, match="no chat template"):
        ask(10_000, lengths=(600,), chat=True)


@pytest.mark.parametrize(
    "options",
    [{"lengths": []}, {"depths": [1.5]}, {"trials": 0}, {"lengths": [512, 512]}, {"digits": 0}, {"length": 5}],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, PasskeyOptions)


def test_the_longest_sequence_is_told_to_the_planner() -> None:
    assert PasskeyOptions(lengths=(700, 300)).max_tokens() == 700
