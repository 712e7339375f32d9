"""One request inside vLLM: its new tokens, and the stop strings that vLLM cannot look for without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infermix.errors import InfermixError
from infermix.roles.engine import Tokenizer
from infermix.roles.request import FinishReason, Request

_REASONS = {reason.value: reason for reason in FinishReason}


@dataclass(slots=True)
class Stream:
    """`output` is kept only where stop strings are looked for."""

    request: Request
    num_output: int = 0
    output: list[int] = field(default_factory=list)

    def take(self, tokens: Sequence[int], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], bool]:
        """The tokens that count, and whether a stop string ends the request with the last of them."""
        if not self.request.sampling.stop or tokenizer is None:
            self.num_output += len(tokens)
            return tuple(tokens), False
        for index, token in enumerate(tokens):
            self.output.append(token)
            self.num_output += 1
            if self._stops(tokenizer):
                return tuple(tokens[: index + 1]), True
        return tuple(tokens), False

    def _stops(self, tokenizer: Tokenizer) -> bool:
        sampling = self.request.sampling
        if self.num_output < sampling.min_new_tokens:
            return False
        # Every token holds at least one byte; four more begin the text before the string, in case of half characters.
        tail = max(len(stop.encode()) for stop in sampling.stop) + 4
        text = tokenizer.decode(self.output[-tail:])
        return any(stop in text for stop in sampling.stop)


def finish_reason(name: str | None) -> FinishReason | None:
    """vLLM's word for why a request ended. Raises `InfermixError` for one that this engine never asks for."""
    if name is None:
        return None
    if name not in _REASONS:
        raise InfermixError(f"vLLM ended a request for the unknown reason {name!r}")
    return _REASONS[name]
