"""Associative recall (Arora et al., 2023, "Zoology"): one of many pairs that a prompt states is asked for at its end.

What has to be kept grows with the number of pairs, so the accuracy tells how much a state of constant size holds;
a full cache holds them all. Every value is a number of its own, so that a guess is no hit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from infermix.quality.components import AssociativeRecallOptions
from infermix.quality.corpus import require_tokenizer
from infermix.quality.generate import generate
from infermix.quality.passkey import first_number
from infermix.roles.engine import Engine, Tokenizer
from infermix.roles.evaluator import EvaluatorContext, Quality
from infermix.roles.request import Request, SamplingParams

_OPENING = "Remember the number of every box."
_PAIR = "Box {name} holds {value}."
_QUESTION = "Which number does box {name} hold?"
_LEAD = " Box {name} holds"
_LETTERS = "ABCDEFGHJKLMNPRSTUVWXYZ"
_MAX_FAILURES = 10


@dataclass(frozen=True)
class Case:
    """One prompt with `num_pairs` pairs; `asked` is the place of the pair that is asked for, from 0."""

    num_pairs: int
    trial: int
    asked: int
    value: str
    prompt_ids: tuple[int, ...]


class AssociativeRecallEvaluator:
    """`associative_recall_accuracy[...]` over all numbers of pairs, and per number where there are several.

    Samples are 1 or 0 per prompt; `details` hold the accuracy by number of pairs and the first wrong answers.
    """

    def __init__(self, options: AssociativeRecallOptions, context: EvaluatorContext) -> None:
        self._options, self._context = options, context

    def evaluate(self, engine: Engine) -> list[Quality]:
        """Greedy answers to every prompt."""
        tokenizer = require_tokenizer(engine, "associative_recall")
        found: list[tuple[Case, str]] = []
        for done, num_pairs in enumerate(self._options.pairs):
            cases = [self._case(tokenizer, num_pairs, trial) for trial in range(self._options.trials)]
            outputs = generate(engine, [self._request(case) for case in cases])
            found += zip(cases, map(tokenizer.decode, outputs), strict=True)
            self._context.progress("associative_recall", (done + 1) / len(self._options.pairs))
        metrics = [self._metric(found, self._options.pairs)]
        if len(self._options.pairs) > 1:
            for number in self._options.pairs:
                metrics.append(self._metric([each for each in found if each[0].num_pairs == number], (number,)))
        return metrics

    def _case(self, tokenizer: Tokenizer, num_pairs: int, trial: int) -> Case:
        """Names and values differ within a prompt; which pair is asked for is drawn evenly."""
        options = self._options
        rng = random.Random(f"{options.seed} {num_pairs} {trial}")
        names = rng.sample([first + second for first in _LETTERS for second in _LETTERS], num_pairs)
        values = rng.sample(range(10 ** (options.digits - 1), 10**options.digits), num_pairs)
        pairs = " ".join(_PAIR.format(name=name, value=value) for name, value in zip(names, values, strict=True))
        asked = rng.randrange(num_pairs)
        text = f"{_OPENING} {pairs} {_QUESTION.format(name=names[asked])}"
        ids = _encoder(tokenizer, options.chat)(text, _LEAD.format(name=names[asked]))
        return Case(num_pairs, trial, asked, str(values[asked]), tuple(ids))

    def _request(self, case: Case) -> Request:
        sampling = SamplingParams(max_new_tokens=self._options.new_tokens)
        return Request(
            request_id=f"recall-{case.num_pairs}-{case.trial}", prompt_ids=case.prompt_ids, sampling=sampling
        )

    def _metric(self, found: list[tuple[Case, str]], pairs: tuple[int, ...]) -> Quality:
        samples = [float(first_number(answer) == case.value) for case, answer in found]
        mean, n = fmean(samples), len(samples)
        return Quality(
            name=self._name(pairs),
            value=mean,
            unit="ratio",
            better="higher",
            stderr=math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None,
            samples=samples,
            details=_details(found, samples),
        )

    def _name(self, pairs: tuple[int, ...]) -> str:
        options = self._options
        protocol = f"{'chat' if options.chat else 'plain'},pairs={'+'.join(map(str, pairs))}"
        return f"associative_recall_accuracy[{protocol},trials={options.trials},digits={options.digits}]"


def _encoder(tokenizer: Tokenizer, chat: bool) -> Callable[[str, str], list[int]]:
    """Question and lead to ids; a chat template asks without the lead."""
    if chat:
        return lambda text, lead: tokenizer.apply_chat([{"role": "user", "content": text}])
    return lambda text, lead: tokenizer.encode(text + lead)


def _details(found: list[tuple[Case, str]], samples: list[float]) -> dict[str, Any]:
    by_number: dict[str, list[float]] = {}
    for (case, _), sample in zip(found, samples, strict=True):
        by_number.setdefault(str(case.num_pairs), []).append(sample)
    wrong = [
        {"num_pairs": case.num_pairs, "asked": case.asked, "value": case.value, "answer": answer}
        for (case, answer), sample in zip(found, samples, strict=True)
        if not sample
    ]
    return {
        "accuracy": {number: fmean(hits) for number, hits in by_number.items()},
        "prompt_tokens": {str(case.num_pairs): len(case.prompt_ids) for case, _ in found},
        "num_prompts": len(found),
        "failures": wrong[:_MAX_FAILURES],
    }
