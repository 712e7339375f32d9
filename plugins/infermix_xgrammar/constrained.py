"""Grammar masks of sequences, kept in step with their tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xgrammar
from infermix.errors import InfermixError, Unsupported, UserError
from infermix.roles.request import Sequence
from infermix.toolkit.masking import MaskedDecoder

from infermix_xgrammar.plugin import JsonConstraint

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext
    from torch import Tensor

    from infermix_xgrammar.plugin import ConstrainedOptions


def build_constrained(options: ConstrainedOptions, context: DecoderContext) -> MaskedDecoder:
    """Raises `UserError` for a constraint that cannot be compiled, `Unsupported` without a tokenizer."""
    if context.inner is None:
        raise Unsupported("this engine offers no decoder to constrain")
    tokenizer = getattr(context.tokenizer, "backend", None)
    if tokenizer is None:
        raise Unsupported("constrained decoding needs a transformers tokenizer, which this model does not have")
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=context.facts.vocab_size, stop_token_ids=list(context.eos_token_ids)
    )
    masks = GrammarMasks(_compiled(options, info))
    return MaskedDecoder(context.inner(options.decoder, options.decoder_options), masks)


def _compiled(options: ConstrainedOptions, info: Any) -> Any:
    compiler, constraint = xgrammar.GrammarCompiler(info), options.constraint
    try:
        if not isinstance(constraint, JsonConstraint):
            return compiler.compile_regex(constraint.pattern)
        if not constraint.schema:
            return compiler.compile_builtin_json_grammar()
        return compiler.compile_json_schema(json.dumps(constraint.schema), any_whitespace=constraint.any_whitespace)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the constraint cannot be compiled: {error}", key="parts.decoder.constraint") from error


@dataclass(slots=True)
class _State:
    matcher: Any
    num_seen: int = 0


class GrammarMasks:
    """One matcher per sequence over its output; behind the end of a sequence anything may follow."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._states: dict[int, _State] = {}

    def fill(self, sequence: Sequence, drafts: tuple[int, ...], bits: Tensor, row: int) -> bool:
        matcher = self._follow(sequence)
        accepted = 0
        while accepted < len(drafts) and not matcher.is_terminated() and matcher.accept_token(drafts[accepted]):
            accepted += 1
        limited = False
        if accepted == len(drafts) and not matcher.is_terminated():
            limited = matcher.fill_next_token_bitmask(bits, row)
        if accepted:
            matcher.rollback(accepted)
        return bool(limited)

    def forget(self, sequence: Sequence) -> None:
        self._states.pop(sequence.seq_id, None)

    def _follow(self, sequence: Sequence) -> Any:
        state = self._states.get(sequence.seq_id)
        if state is None:
            state = self._states[sequence.seq_id] = _State(xgrammar.GrammarMatcher(self._compiled))
        for token in sequence.tokens[sequence.num_prompt_tokens + state.num_seen :]:
            if not state.matcher.is_terminated() and not state.matcher.accept_token(token):
                raise _broken(sequence, token)
        state.num_seen = len(sequence.tokens) - sequence.num_prompt_tokens
        return state.matcher


def _broken(sequence: Sequence, token: int) -> InfermixError:
    """A draft was followed to where only the end may come, before `min_new_tokens`; or something is wrong with us."""
    request, least = sequence.request, sequence.request.sampling.min_new_tokens
    if least:
        return UserError(
            f"request {request.request_id!r} has to have {least} tokens at least, but its constraint ends before",
            hint="lower min_new_tokens, or allow longer outputs",
        )
    return InfermixError(f"token {token} of request {request.request_id!r} breaks the constraint")
