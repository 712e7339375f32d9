"""Prompt lookup: the continuation of the longest suffix of the text that occurred before (Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from infermix.roles.request import Sequence

from infermix_decoders.suffix_automaton import SuffixAutomaton


@dataclass(slots=True)
class _Text:
    automaton: SuffixAutomaton
    num_seen: int = 0


class PromptLookup:
    """Proposes what followed the last earlier occurrence of at least `min_match_tokens` tokens.

    The automaton of a sequence is extended by its new tokens only: O(1) per token, whatever the length.
    """

    def __init__(self, min_match_tokens: int) -> None:
        self._min_match = min_match_tokens
        self._texts: dict[int, _Text] = {}

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        text = self._texts.setdefault(sequence.seq_id, _Text(SuffixAutomaton()))
        for token in sequence.tokens[text.num_seen :]:
            text.automaton.append(token)
        text.num_seen = len(sequence.tokens)
        if text.automaton.match_length < self._min_match:
            return ()
        start = text.automaton.match_end
        return sequence.tokens[start : start + limit]

    def forget(self, sequence: Sequence) -> None:
        self._texts.pop(sequence.seq_id, None)
