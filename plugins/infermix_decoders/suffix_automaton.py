"""Suffix automaton over a growing text (Blumer et al., 1985): its longest repeated suffix, in O(1) a token."""

from __future__ import annotations

from collections.abc import Iterable


class SuffixAutomaton:
    """States are classes of substrings with equal end positions; `length` is the longest of each.

    `match_length` is the length of the longest suffix of the text that also ends at an earlier position, `match_end`
    the most recently seen such position (index behind its last token). Appending costs O(1) amortised.
    """

    def __init__(self, text: Iterable[int] = ()) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self._last = 0
        self.size = 0
        self.match_length = self.match_end = 0
        for token in text:
            self.append(token)

    def append(self, token: int) -> None:
        transitions, links, lengths = self._next, self._link, self._length
        state, current = self._last, len(lengths)
        self.size += 1
        transitions.append({})
        links.append(0)
        lengths.append(lengths[state] + 1)
        self._end.append(self.size)
        while state >= 0 and token not in transitions[state]:
            transitions[state][token] = current
            state = links[state]
        suffix = 0
        if state >= 0:
            suffix = transitions[state][token]
            if lengths[state] + 1 != lengths[suffix]:
                suffix = self._split(state, token)
        links[current] = suffix
        self._last = current
        self.match_length, self.match_end = lengths[suffix], self._end[suffix]
        self._end[suffix] = self.size

    def _split(self, state: int, token: int) -> int:
        """A state of its own for the longest known suffix that ends in `token`: its class holds longer strings."""
        transitions, links = self._next, self._link
        target, clone = transitions[state][token], len(links)
        transitions.append(transitions[target].copy())
        links.append(links[target])
        self._length.append(self._length[state] + 1)
        self._end.append(self._end[target])
        while state >= 0 and transitions[state].get(token) == target:
            transitions[state][token] = clone
            state = links[state]
        links[target] = clone
        return clone
