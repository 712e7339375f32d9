"""The n-grams that lookahead decoding has seen, by their first token."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain

#: N-grams that pile up before all that are old or came twice are dropped.
_MOST_UNTIDY = 4096


class NgramPool:
    """The latest `most` continuations of each token, `length` tokens long; the latest first when asked.

    A step adds a window of n-grams and asks for one token. So adding only appends to one list of tokens and links
    each n-gram to the one before with the same first token (as LZ77 compressors chain their matches); what is old or
    came twice is taken out of a chain when somebody walks along it, and out of memory when much has piled up. No
    object is made for an n-gram: millions of them would keep the garbage collector busy.
    """

    def __init__(self, length: int, most: int) -> None:
        self.length, self._most = length, most
        self._tokens: list[int] = []
        self._before: list[int] = []
        self._latest: dict[int, int] = {}
        self._most_kept = _MOST_UNTIDY

    def add(self, ngrams: Iterable[tuple[int, ...]]) -> None:
        """N-grams of `length` + 1 tokens, the first of which they are found by."""
        size, first, latest, before = self.length + 1, len(self._tokens), self._latest, self._before
        self._tokens += chain.from_iterable(ngrams)
        for index, token in enumerate(self._tokens[first::size], len(before)):
            before.append(latest.get(token, -1))
            latest[token] = index
        if len(before) > self._most_kept:
            self._tidy()

    def after(self, token: int) -> Seq[tuple[int, ...]]:
        index, found, kept = self._latest.get(token, -1), dict[tuple[int, ...], None](), -1
        tokens, before, length, left = self._tokens, self._before, self.length, self._most
        while index >= 0 and left:
            start = index * (length + 1) + 1
            ngram = tuple(tokens[start : start + length])
            if ngram not in found:
                found[ngram] = None
                left -= 1
                if kept >= 0:
                    before[kept] = index
                kept = index
            index = before[index]
        if kept >= 0:
            before[kept] = -1
        return tuple(found)

    def _tidy(self) -> None:
        known = {token: self.after(token) for token in self._latest}
        self._tokens, self._before, self._latest = [], [], {}
        self._most_kept = 2 * sum(map(len, known.values())) + _MOST_UNTIDY
        for token, continuations in known.items():
            self.add((token, *each) for each in reversed(continuations))


def text_ngrams(tokens: Seq[int], start: int, length: int) -> Seq[tuple[int, ...]]:
    """Every n-gram of `length` + 1 tokens that ends at `start` or behind it; a step most often adds one."""
    new = tuple(tokens[start - length if start > length else 0 :])
    if len(new) == length + 1:
        return (new,)
    return [new[first : first + length + 1] for first in range(len(new) - length)]
