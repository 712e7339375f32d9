"""Passkey retrieval (Mohtashami and Jaggi, 2023): a number hidden in a long text is asked for at its end.

The text is synthetic and means nothing, so only what the KV cache still holds of that place can answer.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from infermix.errors import UserError
from infermix.quality.components import PasskeyOptions
from infermix.quality.corpus import require_tokenizer
from infermix.quality.generate import generate
from infermix.roles.engine import Engine, Tokenizer
from infermix.roles.evaluator import EvaluatorContext, Quality
from infermix.roles.request import Request, SamplingParams

_OPENING = "A pass key is hidden in this text. Find it and remember it."
_FILLER = "The river is wide and slow. The hills are green. A boat goes by. The day is long. We come back. "
_HIDDEN = "The pass key is {key}. Remember it. Once more, the pass key is {key}. "
_QUESTION = "What is the pass key?"
_LEAD = " The pass key is"
_MAX_FAILURES = 10


@dataclass(frozen=True)
class Case:
    """One prompt. `depth` is the place of the key in the filler: 0 at its start, 1 at its end."""

    length: int
    depth: float
    trial: int
    key: str
    prompt_ids: tuple[int, ...]


class PasskeyEvaluator:
    """`passkey_accuracy[...]` over all lengths and depths, and the same per length where there are several.

    Samples are 1 or 0 per prompt; `details` hold the accuracy by length and depth and the first wrong answers.
    """

    def __init__(self, options: PasskeyOptions, context: EvaluatorContext) -> None:
        self._options, self._context = options, context

    def evaluate(self, engine: Engine) -> list[Quality]:
        """Greedy answers to every prompt. Raises `UserError` for a length that leaves no room for any filler."""
        tokenizer = require_tokenizer(engine, "passkey")
        cases: list[Case] = []
        answers: list[str] = []
        for done, length in enumerate(self._options.lengths):
            wanted = self._cases(tokenizer, length)
            answers += [tokenizer.decode(ids) for ids in generate(engine, [self._request(case) for case in wanted])]
            cases += wanted
            self._context.progress("passkey", (done + 1) / len(self._options.lengths))
        found = list(zip(cases, answers, strict=True))
        metrics = [self._metric(found, self._options.lengths)]
        if len(self._options.lengths) > 1:
            for length in self._options.lengths:
                part = [(case, answer) for case, answer in found if case.length == length]
                metrics.append(self._metric(part, (length,)))
        return metrics

    def _cases(self, tokenizer: Tokenizer, length: int) -> list[Case]:
        options = self._options
        encode = _plain(tokenizer) if not options.chat else _chat(tokenizer)
        budget = length - options.new_tokens
        cases = []
        for depth in options.depths:
            for trial in range(options.trials):
                rng = random.Random(f"{options.seed} {length} {depth} {trial}")
                key = str(rng.randrange(10 ** (options.digits - 1), 10**options.digits))
                cases.append(Case(length, depth, trial, key, _fitted(encode, key, depth, budget, length)))
        return cases

    def _request(self, case: Case) -> Request:
        sampling = SamplingParams(max_new_tokens=self._options.new_tokens)
        name = f"passkey-{case.length}-{case.depth:g}-{case.trial}"
        return Request(request_id=name, prompt_ids=case.prompt_ids, sampling=sampling)

    def _metric(self, found: list[tuple[Case, str]], lengths: tuple[int, ...]) -> Quality:
        samples = [float(first_number(answer) == case.key) for case, answer in found]
        mean, n = fmean(samples), len(samples)
        return Quality(
            name=self._name(lengths),
            value=mean,
            unit="ratio",
            better="higher",
            stderr=math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None,
            samples=samples,
            details=_details(found, samples),
        )

    def _name(self, lengths: tuple[int, ...]) -> str:
        options = self._options
        sizes, places = "+".join(map(str, lengths)), "+".join(f"{depth:g}" for depth in options.depths)
        protocol = f"{'chat' if options.chat else 'plain'},lengths={sizes},depths={places}"
        return f"passkey_accuracy[{protocol},trials={options.trials},digits={options.digits}]"


def first_number(answer: str) -> str | None:
    """The first run of digits in an answer, thousands separators and all that follows left out."""
    match = re.search(r"\d+", answer)
    return match.group() if match else None


def _plain(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text + _LEAD)


def _chat(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.apply_chat([{"role": "user", "content": text}])


def _fitted(encode: Callable[[str], list[int]], key: str, depth: float, budget: int, length: int) -> tuple[int, ...]:
    """The longest prompt of at most `budget` tokens."""

    def ids(count: int) -> list[int]:
        before = round(depth * count)
        hidden = _HIDDEN.format(key=key)
        return encode(f"{_OPENING} {_FILLER * before}{hidden}{_FILLER * (count - before)}{_QUESTION}")

    one, many = len(ids(1)), len(ids(33))
    if one > budget:
        raise UserError(
            f"a passkey prompt of {length} tokens has no room for any filler",
            key="quality.passkey.lengths",
            hint=f"the shortest is {one + length - budget}",
        )
    count = 1 + max(0, (budget - one) * 32 // max(1, many - one))
    while count > 1 and len(ids(count)) > budget:
        count -= 1
    return tuple(ids(count))


def _details(found: list[tuple[Case, str]], samples: list[float]) -> dict[str, Any]:
    by_place: dict[str, dict[str, list[float]]] = {}
    for (case, _), sample in zip(found, samples, strict=True):
        by_place.setdefault(str(case.length), {}).setdefault(f"{case.depth:g}", []).append(sample)
    wrong = [
        {"length": case.length, "depth": case.depth, "key": case.key, "answer": answer}
        for (case, answer), sample in zip(found, samples, strict=True)
        if not sample
    ]
    return {
        "accuracy": {length: {depth: fmean(hits) for depth, hits in row.items()} for length, row in by_place.items()},
        "prompt_tokens": {str(case.length): len(case.prompt_ids) for case, _ in found},
        "num_prompts": len(found),
        "failures": wrong[:_MAX_FAILURES],
    }
