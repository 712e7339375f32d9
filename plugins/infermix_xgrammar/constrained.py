"""Grammar masks of sequences, kept in step with their tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
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


#: Of those that fill masks: rows take microseconds, and a thread takes some to wake.
_MOST_THREADS = 8


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
    """`ended`: the end of the output was accepted, behind which anything may follow."""

    matcher: Any
    num_seen: int = 0
    ended: bool = False


class GrammarMasks:
    """One matcher per sequence over its output; behind the end of a sequence anything may follow."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        info = compiled.tokenizer_info
        self._stops, self._num_words = frozenset(info.stop_token_ids), -(-info.vocab_size // 32)
        self._states: dict[int, _State] = {}
        self._together = xgrammar.BatchGrammarMatcher(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2)))
        self._beside = ThreadPoolExecutor(1, "grammar-masks")  # starts its thread when it is first used

    def fill(self, sequence: Sequence, drafts: tuple[int, ...], bits: Tensor, row: int) -> bool:
        state = self._follow(sequence)
        return not state.ended and self._fill_behind(state.matcher, drafts, bits, row)

    def fill_all(self, sequences: Seq[Sequence], drafts: Seq[tuple[int, ...]], bits: Tensor) -> bool:
        """Rows without drafts are filled in one call, by several threads."""
        states = self._follow_all(sequences)
        if bits.shape[1] > self._num_words:  # logits of more tokens than there are
            bits.numpy()[:] = -1
        plain = [row for row, state in enumerate(states) if not (drafts[row] or state.ended)]
        self._fill_plain([states[row].matcher for row in plain], bits, plain)
        limited = bool(plain)
        if len(plain) == len(states):
            return limited
        others = [row for row, state in enumerate(states) if drafts[row] or state.ended]
        bits.numpy()[others] = -1
        for row in others:
            state = states[row]
            limited |= not state.ended and self._fill_behind(state.matcher, drafts[row], bits, row)
        return limited

    def begin(self, sequences: Seq[Sequence], bits: Tensor) -> Callable[[], bool]:
        """By a thread: xgrammar leaves the interpreter to others while it works. One row of JSON is worth it, too."""
        return self._beside.submit(self.fill_all, sequences, [()] * len(sequences), bits).result

    def forget(self, sequence: Sequence) -> None:
        self._states.pop(sequence.seq_id, None)

    def _fill_plain(self, matchers: list[Any], bits: Tensor, rows: list[int]) -> None:
        if len(matchers) > 1:
            self._together.batch_fill_next_token_bitmask(matchers, bits, rows)
        elif matchers:  # threads would take longer to wake
            matchers[0].fill_next_token_bitmask(bits, rows[0])

    @staticmethod
    def _fill_behind(matcher: Any, drafts: tuple[int, ...], bits: Tensor, row: int) -> bool:
        """What may come behind `drafts`; anything behind those that the grammar forbids or that end the output."""
        accepted = 0
        while accepted < len(drafts) and not matcher.is_terminated() and matcher.accept_token(drafts[accepted]):
            accepted += 1
        limited = False
        if accepted == len(drafts) and not matcher.is_terminated():
            limited = matcher.fill_next_token_bitmask(bits, row)
        if accepted:
            matcher.rollback(accepted)
        return bool(limited)

    def _follow_all(self, sequences: Seq[Sequence]) -> list[_State]:
        """`_follow` of each. Those with one new token, as after most steps, are told of it in one call."""
        known, states = self._states, []
        behind: list[tuple[Sequence, _State]] = []
        for sequence in sequences:
            state, seen = known.get(sequence.seq_id), len(sequence.tokens) - sequence.num_prompt_tokens - 1
            if state is None or state.ended or state.num_seen != seen:
                state = self._follow(sequence)
            else:
                state.num_seen += 1  # a sequence may have several rows
                behind.append((sequence, state))
            states.append(state)
        self._accept_last(behind)
        return states

    def _accept_last(self, behind: Seq[tuple[Sequence, _State]]) -> None:
        tokens = [sequence.tokens[-1] for sequence, _ in behind]
        if len(behind) > 1:
            fine = self._together.batch_accept_token([state.matcher for _, state in behind], tokens)
        else:
            fine = [state.matcher.accept_token(token) for (_, state), token in zip(behind, tokens, strict=True)]
        for (sequence, state), token, accepted in zip(behind, tokens, fine, strict=True):
            if not accepted:
                raise _broken(sequence, token)
            if token in self._stops:
                state.ended = True

    def _follow(self, sequence: Sequence) -> _State:
        """The state of a sequence, behind all of its tokens."""
        state = self._states.get(sequence.seq_id)
        if state is None:
            state = self._states[sequence.seq_id] = _State(xgrammar.GrammarMatcher(self._compiled))
        seen = sequence.num_prompt_tokens + state.num_seen
        if seen == len(sequence.tokens):
            return state
        for token in sequence.tokens[seen:]:
            if not state.ended and not state.matcher.accept_token(token):
                raise _broken(sequence, token)
            state.ended |= token in self._stops
        state.num_seen = len(sequence.tokens) - sequence.num_prompt_tokens
        return state


def _broken(sequence: Sequence, token: int) -> InfermixError:
    """A draft was followed to where only the end may come, before `min_new_tokens`; or something is wrong with us."""
    request, least = sequence.request, sequence.request.sampling.min_new_tokens
    if least:
        return UserError(
            f"request {request.request_id!r} has to have {least} tokens at least, but its constraint ends before",
            hint="lower min_new_tokens, or allow longer outputs",
        )
    return InfermixError(f"token {token} of request {request.request_id!r} breaks the constraint")
