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
        self.size += 1
        current = self._new(self._length[self._last] + 1, {})
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        self._link[current] = 0 if state < 0 else self._split(state, token)
        self._last = current
        suffix = self._link[current]
        self.match_length, self.match_end = self._length[suffix], self._end[suffix]
        self._end[suffix] = self.size

    def _new(self, length: int, transitions: dict[int, int]) -> int:
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(self.size)
        return len(self._length) - 1

    def _split(self, state: int, token: int) -> int:
        """The state of the longest known suffix that ends in `token`, cloned when its class holds longer strings."""
        target = self._next[state][token]
        if self._length[state] + 1 == self._length[target]:
            return target
        clone = self._new(self._length[state] + 1, dict(self._next[target]))
        self._link[clone], self._end[clone] = self._link[target], self._end[target]
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        self._link[target] = clone
        return clone
