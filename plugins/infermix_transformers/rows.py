"""One request inside a `generate()` call: which of its tokens count, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infermix.roles.engine import Tokenizer
from infermix.roles.request import FinishReason, Request, SamplingParams

#: Tokens decoded to look for a stop string, beyond its own length in characters.
STOP_CONTEXT_TOKENS = 8


@dataclass(slots=True)
class Row:
    """`stop_ids` end it once `min_new_tokens` are out; tokens after its end are dropped."""

    request: Request
    stop_ids: frozenset[int]
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def accept(self, token_id: int, tokenizer: Tokenizer | None) -> None:
        """Append one token and decide whether the row ends with it."""
        self.output.append(token_id)
        sampling = self.request.sampling
        if self._stops(token_id, sampling, tokenizer):
            self.finish_reason = FinishReason.STOP
        elif len(self.output) >= sampling.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH

    def _stops(self, token_id: int, sampling: SamplingParams, tokenizer: Tokenizer | None) -> bool:
        if len(self.output) < sampling.min_new_tokens:
            return False
        if token_id in self.stop_ids:
            return True
        if not sampling.stop or tokenizer is None:
            return False
        tail = self.output[-(max(map(len, sampling.stop)) + STOP_CONTEXT_TOKENS) :]
        text = tokenizer.decode(tail)
        return any(stop in text for stop in sampling.stop)


def batch_key(sampling: SamplingParams) -> tuple[object, ...]:
    """Requests with equal keys can share one `generate()` call; lengths and stop strings are handled per row."""
    return (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.min_new_tokens,
        sampling.ignore_eos,
        sampling.stop_token_ids,
    )


def take_batch(waiting: list[Request], batch_size: int) -> list[Request]:
    """Remove from `waiting` and return the first request and the next ones that can share its call."""
    key = batch_key(waiting[0].sampling)
    chosen: list[Request] = []
    rest: list[Request] = []
    for index, request in enumerate(waiting):
        if len(chosen) == batch_size:
            rest.extend(waiting[index:])
            break
        (chosen if batch_key(request.sampling) == key else rest).append(request)
    waiting[:] = rest
    return chosen


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids padded on the left to one length, and the mask that marks the real ones with 1."""
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return ids, mask
