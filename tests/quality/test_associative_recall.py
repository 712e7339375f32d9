"""The recall check: prompts with so many pairs, one asked for, and answers judged strictly."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import torch
from infermix.errors import UserError
from infermix.quality.associative_recall import AssociativeRecallEvaluator
from infermix.quality.components import AssociativeRecallOptions

OFFSET = 3  # of the byte tokenizer


def reader(num_kept: int, tokenizer: Any) -> Any:
    """Next-token logits of a model that keeps the last `num_kept` pairs."""

    def next_logits(tokens: tuple[int, ...]) -> torch.Tensor:
        text = tokenizer.decode(tokens)
        start = re.search(r"hold\? Box ([A-Z]{2}) holds", text)
        assert start is not None
        pairs = dict(re.findall(r"Box ([A-Z]{2}) holds (\d+)\.", text[: start.start()])[-num_kept:])
        wanted = f" {pairs.get(start.group(1), 'lost')}."
        answer = text[start.end() :]
        logits = torch.zeros(tokenizer.vocab_size)
        logits[ord(wanted[min(len(answer), len(wanted) - 1)]) + OFFSET] = 1.0
        return logits

    return next_logits


@pytest.fixture
def ask(table_engine: Any, byte_tokenizer: Any, evaluator_context: Any) -> Any:
    def run(num_kept: int, **options: Any) -> tuple[Any, Any]:
        engine = table_engine(reader(num_kept, byte_tokenizer))
        submitted: list[Any] = []
        submit = engine.submit
        engine.submit = lambda request: (submitted.append(request), submit(request))
        chosen = AssociativeRecallOptions(**options)
        return AssociativeRecallEvaluator(chosen, evaluator_context()).evaluate(engine), submitted

    return run


def test_a_model_that_keeps_everything_recalls_everything(ask: Any) -> None:
    (whole, few, many), _ = ask(100, pairs=(4, 20), trials=5)
    assert whole.name == "associative_recall_accuracy[plain,pairs=4+20,trials=5,digits=3]"
    assert many.name == "associative_recall_accuracy[plain,pairs=20,trials=5,digits=3]"
    assert [metric.value for metric in (whole, few, many)] == [1.0, 1.0, 1.0]
    assert whole.samples == [1.0] * 10
    assert whole.details["failures"] == []


def test_a_small_state_recalls_few_of_many(ask: Any) -> None:
    (whole, few, many), _ = ask(4, pairs=(4, 40), trials=30)
    assert few.value == 1.0
    assert many.value < 0.4
    assert whole.details["accuracy"] == {"4": 1.0, "40": many.value}
    assert whole.details["failures"][0]["answer"].startswith(" lost")
    missed = [case["asked"] for case in whole.details["failures"]]
    assert max(missed) < 36


def test_names_and_values_differ_and_the_asked_pair_is_stated_once(ask: Any, byte_tokenizer: Any) -> None:
    _, submitted = ask(100, pairs=(50,), trials=4)
    for request in submitted:
        text = byte_tokenizer.decode(request.prompt_ids)
        pairs = re.findall(r"Box ([A-Z]{2}) holds (\d{3})\.", text)
        assert len({name for name, _ in pairs}) == len({value for _, value in pairs}) == 50
        asked = re.search(r"box ([A-Z]{2}) hold\?", text)
        assert asked is not None
        assert asked.group(1) in dict(pairs)


def test_the_longest_prompt_is_announced(ask: Any) -> None:
    options = AssociativeRecallOptions(pairs=(60,), digits=5, trials=3)
    _, submitted = ask(100, pairs=(60,), digits=5, trials=3)
    assert all(len(each.prompt_ids) + options.new_tokens <= options.max_tokens() for each in submitted)


def test_prompts_depend_on_the_seed_alone(ask: Any) -> None:
    prompts = [[each.prompt_ids for each in ask(9, pairs=(6,), trials=3, seed=seed)[1]] for seed in (0, 0, 1)]
    assert prompts[0] == prompts[1] != prompts[2]
    assert len(set(prompts[0])) == 3


def test_a_model_without_a_chat_template_is_an_error(ask: Any) -> None:
    with pytest.raises(UserError, match="no chat template"):
        ask(9, pairs=(4,), chat=True)


@pytest.mark.parametrize("options", [{"pairs": []}, {"pairs": [0]}, {"pairs": [4, 4]}, {"trials": 0}, {"digits": 2}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, AssociativeRecallOptions)
