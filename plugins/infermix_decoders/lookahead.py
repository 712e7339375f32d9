"""Lookahead decoding (Fu et al., 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding").

One forward holds two things, told apart by a tree mask. The lookahead branch is a window of `window` columns that
remembers the last `ngram - 1` Jacobi iterations: level 0, the oldest, is a line of guesses behind the text, and on
each of them hang the guesses that later iterations made for the positions behind it. The target's tokens at the ends
of the columns complete one n-gram each, which go to the pool. The verification branch holds the n-grams of the pool
that begin with the last known token. Both are verified as one draft tree, so the text is that of plain decoding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

from infermix.roles.decoder import Forward
from infermix.roles.request import Sequence
from infermix.toolkit.tree_verification import DraftTree, Verified, last_child

from infermix_decoders.ngram_pool import NgramPool, text_ngrams


@dataclass(frozen=True, slots=True)
class Columns:
    """The window as a tree of a stated depth: its line first, then the rest of one column after the other.

    `pick` takes the nodes' tokens out of the levels, which lie one after the other; `behind` are the rows of a
    forward behind the last nodes of those columns that the depth leaves whole: the first ones.
    """

    parents: tuple[int, ...]
    pick: Callable[[tuple[int, ...]], tuple[int, ...]]
    behind: slice

    @staticmethod
    def within(depth: int, width: int, num_levels: int) -> Columns:
        line = min(width, depth)
        parents, places = list(range(-1, line - 1)), list(range(line))
        for column in range(line):
            node = column
            for level in range(1, min(num_levels, depth - column)):
                parents.append(node)
                places.append(level * width + column)
                node = len(places) - 1
        num_whole, step = max(0, min(line, depth - num_levels + 1)), max(1, num_levels - 1)
        first = 1 if num_levels == 1 else line + num_levels - 1  # row i is behind node i - 1
        # Of a single place an `itemgetter` makes no tuple; that place is the first.
        pick = itemgetter(*places) if len(places) > 1 else itemgetter(slice(len(places)))
        return Columns(tuple(parents), pick, slice(first, first + num_whole * step, step))


@dataclass(slots=True)
class Window:
    """`levels[l][j]`: column j at level l, a guess for the position j + l + 1 behind the last known token.

    `columns` is what the last tree held of it.
    """

    levels: list[list[int]]
    rng: random.Random
    pool: NgramPool
    columns: Columns


def add_branches(tokens: list[int], parents: list[int], branches: Seq[tuple[int, ...]]) -> None:
    """Hang branches on the text, which has one guess behind it; guesses that begin alike share their nodes.

    Behind a node that a branch brought comes the next one of that branch, or one that `forks` knows.
    """
    size, forks = len(tokens), {(-1, tokens[0]): 0}
    for branch in branches:
        node, depth, first = -1, 0, len(tokens)
        for token in branch:
            following = node + 1
            if size <= node and following < first and tokens[following] == token and parents[following] == node:
                node = following
            elif (fork := forks.get((node, token), -1)) >= 0 or (
                0 <= node < size and (fork := last_child(tokens, parents, node, token)) >= 0
            ):
                node = fork
            else:
                break
            depth += 1
        if depth < len(branch):
            forks[node, branch[depth]] = first
            tokens += branch[depth:] if depth else branch
            parents.append(node)
            parents += range(first, len(tokens) - 1)


class LookaheadDrafter:
    """The trees of lookahead decoding; what it keeps of a sequence are its window and its pool."""

    reads_hidden = False

    def __init__(self, window: int, ngram: int, guesses: int, *, pool_from_prompt: bool) -> None:
        self._width, self._levels, self._guesses = window, ngram - 1, guesses
        self._from_prompt = pool_from_prompt
        self.num_nodes = (window + guesses) * (ngram - 1)
        self._columns = [Columns.within(depth, window, ngram - 1) for depth in range(window + ngram - 1)]
        self._windows: dict[int, Window] = {}

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> Seq[DraftTree]:
        return [self._tree(sequence, depth) for sequence, depth in zip(sequences, depths, strict=True)]

    def observe(self, verified: Seq[Verified], forward: Forward) -> None:
        for each in verified:
            window = self._windows.get(each.entry.sequence.seq_id)
            if window is not None and each.token_ids:
                self._move(window, each)

    def forget(self, sequence: Sequence) -> None:
        self._windows.pop(sequence.seq_id, None)

    def _tree(self, sequence: Sequence, depth: int) -> DraftTree:
        window = self._windows.get(sequence.seq_id)
        if window is None:
            window = self._windows[sequence.seq_id] = self._begin(sequence)
        columns = window.columns = self._columns[min(depth, len(self._columns) - 1)]
        flat = tuple(chain.from_iterable(window.levels))
        guesses = window.pool.after(sequence.tokens[-1])
        if not guesses:
            return DraftTree(columns.pick(flat), columns.parents)
        tokens, parents = list(columns.pick(flat)), list(columns.parents)
        add_branches(tokens, parents, guesses if depth >= self._levels else [guess[:depth] for guess in guesses])
        return DraftTree(tuple(tokens), tuple(parents))

    def _begin(self, sequence: Sequence) -> Window:
        rng = random.Random(sequence.request.sampling.seed)
        levels = [[rng.choice(sequence.tokens) for _ in range(self._width)] for _ in range(self._levels)]
        pool = NgramPool(self._levels, self._guesses)
        pool.add(text_ngrams(sequence.tokens, 0 if self._from_prompt else sequence.num_prompt_tokens, self._levels))
        return Window(levels, rng, pool, self._columns[0])

    def _move(self, window: Window, verified: Verified) -> None:
        """One iteration on: every level becomes the one below it, the target's tokens the last one.

        A level then guesses one position less far ahead, which one new token of the text makes good; for each further
        one the window loses its first column and gets a fresh last one.
        """
        draws, levels, known = verified.draws, window.levels, verified.entry.sequence.tokens
        newest = list(draws[window.columns.behind])
        text = [*known[-self._levels :], *verified.token_ids]
        found = text_ngrams(text, len(text) - len(verified.token_ids), self._levels)
        window.pool.add([*zip(*levels, newest, strict=False), *found])
        if len(newest) < self._width:
            newest += self._any(window, verified, self._width - len(newest))
        window.levels, window.columns = [*levels[1:], newest], self._columns[0]
        if len(verified.token_ids) > 1:
            passed = min(len(verified.token_ids) - 1, self._width)
            for level in window.levels:
                del level[:passed]
                level += self._any(window, verified, passed)

    @staticmethod
    def _any(window: Window, verified: Verified, count: int) -> list[int]:
        """Some tokens of the text, where nothing better is known."""
        return window.rng.choices(verified.entry.sequence.tokens, k=count)
