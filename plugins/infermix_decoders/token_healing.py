"""Token healing (Lundberg, 2023): the last tokens of a prompt are written again, as the model would write them.

A prompt that ends inside a word has a last token that the tokenizer would not have made of the whole word. It is
taken away, and what comes out has to begin with its text; how that text is cut into tokens is up to the model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from infermix.errors import Unsupported
from infermix.roles.request import Request, Sequence
from infermix.toolkit.masking import MaskedDecoder, pack_bits
from torch import Tensor

from infermix_decoders.token_bytes import bytes_of_tokens

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext

    from infermix_decoders.options import TokenHealingOptions


@dataclass(frozen=True, kw_only=True)
class HealedRequest(Request):
    """A request whose output has to begin with the bytes `healed`."""

    healed: bytes = b""


def build_token_healing(options: TokenHealingOptions, context: DecoderContext) -> HealingDecoder:
    """Raises `Unsupported` without a tokenizer whose tokens have texts of their own."""
    if context.inner is None:
        raise Unsupported("this engine offers no decoder to heal prompts for")
    if context.tokenizer is None:
        raise Unsupported("token healing needs a tokenizer, which this model does not have")
    pieces = bytes_of_tokens(context.tokenizer, context.facts.vocab_size)
    decoder = context.inner(options.decoder, options.decoder_options)
    return HealingDecoder(decoder, Pieces(pieces), options.num_tokens)


class Pieces:
    """The tokens of a vocabulary by their bytes; tokens without any (special ones) never heal."""

    def __init__(self, pieces: Seq[bytes]) -> None:
        self.pieces = pieces
        ordered = sorted((piece, token) for token, piece in enumerate(pieces) if piece)
        self._ordered = [piece for piece, _ in ordered]
        self._tokens = [token for _, token in ordered]
        self._masks: dict[bytes, Tensor] = {}

    def allowed(self, rest: bytes) -> Tensor:
        """Bool `[V]`: tokens that begin with `rest`, or that it begins with if others can make up the remainder."""
        mask = self._masks.get(rest)
        if mask is None:
            mask = self._masks[rest] = torch.zeros(len(self.pieces), dtype=torch.bool)
            for end in range(1, len(rest)):
                if self.allowed(rest[end:]).any():
                    mask[self._between(rest[:end], rest[:end] + b"\0")] = True
            mask[self._between(rest, _after(rest))] = True
        return mask

    def _between(self, low: bytes, high: bytes | None) -> list[int]:
        stop = len(self._ordered) if high is None else bisect_left(self._ordered, high)
        return self._tokens[bisect_left(self._ordered, low) : stop]


class HealingMasks:
    """Stateless: what is still to be healed follows from the request and its output."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def fill(self, sequence: Sequence, drafts: tuple[int, ...], bits: Tensor, row: int) -> bool:
        rest = getattr(sequence.request, "healed", b"")
        if not rest or len(sequence.tokens) - sequence.num_prompt_tokens > len(rest):
            return False
        for token in (*sequence.tokens[sequence.num_prompt_tokens :], *drafts):
            piece = self._pieces.pieces[token]
            if not piece or len(piece) >= len(rest) or not rest.startswith(piece):
                return False  # healed, or behind a draft that is forbidden
            rest = rest[len(piece) :]
        bits[row] = pack_bits(self._pieces.allowed(rest))
        return True

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


class HealingDecoder(MaskedDecoder):
    """Takes up to `num_tokens` tokens off every prompt; its first one stays, and so do special ones."""

    def __init__(self, decoder: Any, pieces: Pieces, num_tokens: int) -> None:
        super().__init__(decoder, HealingMasks(pieces))
        self._pieces, self._num_tokens = pieces, num_tokens

    def prepare(self, request: Request) -> Request:
        request = super().prepare(request)
        prompt, healed = list(request.prompt_ids), b""
        while len(prompt) > 1 and len(request.prompt_ids) - len(prompt) < self._num_tokens:
            piece = self._pieces.pieces[prompt[-1]]
            if not piece:
                break
            healed = piece + healed
            prompt.pop()
        given = {field.name: getattr(request, field.name) for field in fields(Request)}
        return HealedRequest(**{**given, "prompt_ids": tuple(prompt)}, healed=healed)


def _after(prefix: bytes) -> bytes | None:
    """The first bytes behind all that begin with `prefix`; `None` when there are none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None
