"""Prompt lookup: the continuation of the longest suffix of the text that occurred before (Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from infermix.roles.request import Sequence

from infermix_decoders.suffix_automaton import SuffixAutomaton


class PromptLookup:
    """Proposes what followed the last earlier occurrence of at least `min_match_tokens` tokens.

    The automaton of a sequence is extended by its new tokens only: O(1) per token, whatever the length.
    """

    def __init__(self, min_match_tokens: int) -> None:
        self._min_match = min_match_tokens
        self._texts: dict[int, SuffixAutomaton] = {}

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        automaton, tokens = self._texts.get(sequence.seq_id), sequence.tokens
        if automaton is None:
            automaton = self._texts[sequence.seq_id] = SuffixAutomaton()
        for token in tokens[automaton.size :]:
            automaton.append(token)
        if automaton.match_length < self._min_match:
            return ()
        start = automaton.match_end
        return tokens[start : start + limit]

    def forget(self, sequence: Sequence) -> None:
        self._texts.pop(sequence.seq_id, None)
