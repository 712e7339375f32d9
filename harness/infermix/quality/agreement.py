"""Agreement of a cell with the reference parts: logits position by position, then greedy tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infermix.errors import InfermixError
from infermix.quality.components import AgreementOptions, context_suffix
from infermix.quality.corpus import corpus_tokens, require_tokenizer
from infermix.quality.divergence import (
    NOTHING_COMPARED,
    Divergence,
    compare_logits,
    first_difference,
    top2_margin,
)
from infermix.quality.generate import generate
from infermix.roles.engine import Engine, ScoreRequest
from infermix.roles.evaluator import EvaluatorContext, Quality
from infermix.roles.request import Request, SamplingParams

#: A lossless mix may differ at near ties, but at no more than this share of the cases.
MAX_EXCUSED_SHARE = 0.01

#: Rows of logits that each engine hands over at once: pieces are scored together, so that decoding batches them.
ROWS_PER_CALL = 2048


@dataclass(frozen=True)
class GreedyCase:
    """One prompt: where the outputs part (`None`: nowhere), and whether a near tie excuses it."""

    divergence: int | None
    excused: bool = False


def mean_and_stderr(samples: Sequence[float]) -> tuple[float, float | None]:
    """Mean of independent samples and its standard error (`None` for a single one)."""
    n = len(samples)
    mean = math.fsum(samples) / n
    if n < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((sample - mean) ** 2 for sample in samples) / (n - 1) / n)


class AgreementEvaluator:
    """Metrics `kl_divergence`, `top1_agreement`, `first_divergence`, `greedy_identical`.

    Samples are one value per sequence. `details` hold the counts behind the rule for lossless parts:
    `disagreements`, `excused`, and `lossless`: all are excused, and these are at most 1 %.
    """

    def __init__(self, options: AgreementOptions, context: EvaluatorContext) -> None:
        self._options, self._context = options, context

    def evaluate(self, engine: Engine) -> list[Quality]:
        """Builds the reference engine, compares some sequences at a time, and closes it again."""
        options = self._options
        tokenizer = require_tokenizer(engine, "agreement")
        wanted = options.num_sequences * options.num_tokens
        corpus, ids = corpus_tokens(options.corpus, self._context.base, tokenizer, wanted)
        pieces = [ids[i : i + options.num_tokens] for i in range(0, wanted, options.num_tokens)]
        details = {"corpus": options.corpus, "corpus_sha256": corpus.sha256, "near_tie": options.near_tie}
        reference = self._context.reference()
        try:
            metrics = self._logit_metrics(engine, reference, pieces, corpus.label, details)
            if options.new_tokens:
                metrics += self._greedy_metrics(engine, reference, pieces, corpus.label, details)
        finally:
            reference.close()
        return metrics

    def _logit_metrics(
        self, engine: Engine, reference: Engine, pieces: list[list[int]], label: str, details: dict[str, Any]
    ) -> list[Quality]:
        parts: list[Divergence] = []
        count = max(1, ROWS_PER_CALL // self._options.num_tokens)
        for begin in range(0, len(pieces), count):
            parts += self._compare(engine, reference, pieces[begin : begin + count])
            self._context.progress("agreement: logits", len(parts) / len(pieces))
        total = sum(parts, NOTHING_COMPARED)
        options = self._options
        protocol = f"{label},{options.protocol},sequences={options.num_sequences},tokens={options.num_tokens}"
        protocol += context_suffix(options.min_context)
        details = {
            **details,
            "num_positions": total.num_positions,
            "max_logit_difference": total.max_logit_difference,
            **_verdict(total.num_positions, total.disagreements, total.excused),
        }
        kl = [part.kl / part.num_positions for part in parts]
        top1 = [1 - part.disagreements / part.num_positions for part in parts]
        return [
            _metric(f"kl_divergence[{protocol}]", kl, "nats", "lower", details),
            _metric(f"top1_agreement[{protocol}]", top1, "ratio", "higher", details),
        ]

    def _compare(self, engine: Engine, reference: Engine, pieces: list[list[int]]) -> list[Divergence]:
        first, protocol, near_tie = self._options.min_context, self._options.protocol, self._options.near_tie
        requests = [ScoreRequest(tuple(piece), first, protocol, want_logits=True) for piece in pieces]
        scores = zip(reference.score(requests), engine.score(requests), strict=True)
        try:
            return [compare_logits(expected.logits, actual.logits, near_tie) for expected, actual in scores]
        except ValueError as error:
            raise InfermixError(f"agreement: {error}") from error

    def _greedy_metrics(
        self, engine: Engine, reference: Engine, pieces: list[list[int]], label: str, details: dict[str, Any]
    ) -> list[Quality]:
        options = self._options
        prompts = [tuple(piece[: options.prompt_tokens]) for piece in pieces]
        expected = generate(reference, self._requests(prompts))
        self._context.progress("agreement: greedy", 0.5)
        actual = generate(engine, self._requests(prompts))
        cases = [self._judge(reference, *case) for case in zip(prompts, expected, actual, strict=True)]
        self._context.progress("agreement: greedy", 1.0)
        until = [float(options.new_tokens if case.divergence is None else case.divergence) for case in cases]
        differing = [case for case in cases if case.divergence is not None]
        excused = sum(case.excused for case in differing)
        details = {
            **details,
            "num_prompts": len(cases),
            "divergences": [case.divergence for case in cases],
            **_verdict(int(sum(until)) + len(differing), len(differing), excused),
        }
        protocol = f"{label},prompts={len(cases)},prompt_tokens={options.prompt_tokens},tokens={options.new_tokens}"
        same = [float(case.divergence is None) for case in cases]
        return [
            _metric(f"first_divergence[{protocol}]", until, "tokens", "higher", details),
            _metric(f"greedy_identical[{protocol}]", same, "ratio", "higher", details),
        ]

    def _requests(self, prompts: list[tuple[int, ...]]) -> list[Request]:
        sampling = SamplingParams(max_new_tokens=self._options.new_tokens, ignore_eos=True)
        return [
            Request(request_id=f"agreement-{i}", prompt_ids=prompt, sampling=sampling)
            for i, prompt in enumerate(prompts)
        ]

    def _judge(
        self, reference: Engine, prompt: tuple[int, ...], expected: list[int], actual: list[int]
    ) -> GreedyCase:
        position = first_difference(expected, actual)
        if position is None or position == len(expected):
            return GreedyCase(position)
        upto = (*prompt, *expected[: position + 1])
        (score,) = reference.score([ScoreRequest(upto, len(upto) - 1, want_logits=True)])
        return GreedyCase(position, bool(top2_margin(score.logits)[0] < self._options.near_tie))


def _metric(name: str, samples: list[float], unit: str, better: str, details: dict[str, Any]) -> Quality:
    mean, stderr = mean_and_stderr(samples)
    return Quality(name=name, value=mean, unit=unit, better=better, stderr=stderr, samples=samples, details=details)


def _verdict(num_cases: int, disagreements: int, excused: int) -> dict[str, Any]:
    return {
        "disagreements": disagreements,
        "excused": excused,
        "excused_share": excused / num_cases,
        "lossless": disagreements == excused <= MAX_EXCUSED_SHARE * num_cases,
    }
