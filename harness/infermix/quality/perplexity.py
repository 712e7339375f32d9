"""Perplexity under a named protocol, through `Engine.score`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from infermix.errors import InfermixError, UserError
from infermix.quality.components import PerplexityOptions, context_suffix
from infermix.quality.corpus import corpus_tokens, require_tokenizer
from infermix.roles.engine import Engine, ScoreRequest, Tokenizer
from infermix.roles.evaluator import EvaluatorContext, Quality
from infermix.toolkit.corpus import Corpus

#: Windows handed to the engine at once: enough to batch, few enough to show progress.
WINDOWS_PER_CALL = 8

#: Nats per token from which exp() is no longer a useful (or finite) number.
MAX_NATS = 700.0


@dataclass(frozen=True)
class Window:
    """Corpus tokens `[start, end)`; those from `first_new` on are not in the window before."""

    start: int
    end: int
    first_new: int


def windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Windows of at most `window` tokens, `stride` apart, that together cover every token once as new."""
    start, covered = 0, 0
    while covered < num_tokens:
        end = min(start + window, num_tokens)
        yield Window(start, end, covered)
        start, covered = start + stride, end


@dataclass(frozen=True)
class WindowLoss:
    """Negative log-likelihood in nats, summed over `num_tokens` scored tokens of one window."""

    nats: float
    num_tokens: int


def mean_and_stderr(losses: list[WindowLoss]) -> tuple[float, float | None]:
    """Nats per token over all windows, and its standard error with windows as the independent units.

    The mean is a ratio of two sums, so this is the error of a ratio estimator (delta method); `None` for one
    window.
    """
    total = sum(loss.num_tokens for loss in losses)
    mean = sum(loss.nats for loss in losses) / total
    n = len(losses)
    if n < 2:
        return mean, None
    squares = sum((loss.nats - mean * loss.num_tokens) ** 2 for loss in losses)
    return mean, math.sqrt(squares * n / (n - 1)) / total


class PerplexityEvaluator:
    """One metric, `perplexity[...]`; its name carries corpus, protocol, window, stride, BOS and tokens."""

    def __init__(self, options: PerplexityOptions, context: EvaluatorContext) -> None:
        self._options, self._context = options, context

    def evaluate(self, engine: Engine) -> list[Quality]:
        """Samples are nats per token of each window. Raises `UserError` for a corpus that is too short."""
        options = self._options
        tokenizer = require_tokenizer(engine, "perplexity")
        corpus, ids = corpus_tokens(options.corpus, self._context.base, tokenizer, options.num_tokens)
        if len(ids) <= options.min_context:
            least = options.min_context + 1
            raise UserError(f"the corpus has {len(ids)} tokens, {least} are the least", where=options.corpus)
        losses = self._score(engine, ids, self._prefix(tokenizer))
        return [self._metric(corpus, ids, losses, tokenizer)]

    def _prefix(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        if self._options.bos == "none":
            return ()
        if tokenizer.bos_token_id is None:
            raise UserError("this tokenizer has no BOS token", key="quality.perplexity.bos", hint="use bos: none")
        return (tokenizer.bos_token_id,)

    def _score(self, engine: Engine, ids: list[int], prefix: tuple[int, ...]) -> list[WindowLoss]:
        plan = windows(len(ids), self._options.window, self._options.effective_stride)
        requests = [self._request(ids, window, prefix) for window in plan]
        # A last window that is too short has nothing to score.
        requests = [request for request in requests if request.first < len(request.token_ids)]
        losses: list[WindowLoss] = []
        for begin in range(0, len(requests), WINDOWS_PER_CALL):
            scores = engine.score(requests[begin : begin + WINDOWS_PER_CALL])
            losses.extend(WindowLoss(-math.fsum(score.logprobs), len(score.logprobs)) for score in scores)
            self._context.progress("perplexity", len(losses) / len(requests))
        return losses

    def _request(self, ids: list[int], window: Window, prefix: tuple[int, ...]) -> ScoreRequest:
        tokens = (*prefix, *ids[window.start : window.end])
        first = len(prefix) + window.first_new - window.start
        # A sequence's very first token has nothing before it that could predict it.
        return ScoreRequest(tokens, max(first, self._options.min_context), self._options.protocol)

    def _metric(self, corpus: Corpus, ids: list[int], losses: list[WindowLoss], tokenizer: Tokenizer) -> Quality:
        mean, stderr = mean_and_stderr(losses)
        if not math.isfinite(mean):
            raise InfermixError(f"perplexity: the engine's log-probabilities are not finite (mean {-mean})")
        perplexity = math.exp(min(mean, MAX_NATS))
        num_bytes = len(tokenizer.decode(ids).encode())
        return Quality(
            name=self._name(corpus, len(ids)),
            value=perplexity,
            unit="perplexity",
            better="lower",
            stderr=None if stderr is None else perplexity * stderr,
            samples=[loss.nats / loss.num_tokens for loss in losses],
            details={
                "corpus": self._options.corpus,
                "corpus_sha256": corpus.sha256,
                "num_tokens": len(ids),
                "num_scored_tokens": sum(loss.num_tokens for loss in losses),
                "num_windows": len(losses),
                "window_scored_tokens": [loss.num_tokens for loss in losses],
                "num_bytes": num_bytes,
                "nats_per_token": mean,
                "bits_per_byte": mean * len(ids) / (math.log(2) * num_bytes),
            },
        )

    def _name(self, corpus: Corpus, num_tokens: int) -> str:
        options = self._options
        return (
            f"perplexity[{corpus.label},{options.protocol},window={options.window},"
            f"stride={options.effective_stride},bos={options.bos},tokens={num_tokens}"
            f"{context_suffix(options.min_context)}]"
        )
