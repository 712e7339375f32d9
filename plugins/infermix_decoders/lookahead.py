"""Lookahead decoding (Fu et al., 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding").

One forward holds two things, told apart by a tree mask. The lookahead branch is a window of `window` columns that
remembers the last `ngram - 1` Jacobi iterations: level 0, the oldest, is a line of guesses behind the text, and on
each of them hang the guesses that later iterations made for the positions behind it. The target's tokens at the ends
of the columns complete one n-gram each, which go to the pool. The verification branch holds the n-grams of the pool
that begin with the last known token. Both are verified as one draft tree, so the text is that of plain decoding.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from infermix.roles.decoder import Forward
from infermix.roles.request import Sequence
from infermix.toolkit.tree_verification import DraftTree, Verified


class NgramPool:
    """The latest `most` continuations of each token, `length` tokens long; the latest first when asked."""

    def __init__(self, length: int, most: int) -> None:
        self.length, self._most = length, most
        self._known: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, token: int, continuation: tuple[int, ...]) -> None:
        known = self._known.setdefault(token, OrderedDict())
        known[continuation] = None
        known.move_to_end(continuation)
        if len(known) > self._most:
            known.popitem(last=False)

    def add_text(self, tokens: Seq[int], start: int) -> None:
        """Every n-gram that ends at `start` or behind it."""
        for end in range(max(start, self.length), len(tokens)):
            self.add(tokens[end - self.length], tuple(tokens[end - self.length + 1 : end + 1]))

    def after(self, token: int) -> Seq[tuple[int, ...]]:
        return tuple(reversed(self._known.get(token, ())))


@dataclass(slots=True)
class Window:
    """`levels[l][j]`: column j at level l, a guess for the position j + l + 1 behind the last known token."""

    levels: list[list[int]]
    rng: random.Random
    pool: NgramPool
    num_seen: int = 0
    #: Index in the last tree of column j's node at each level; a column cut off by the tree's depth is shorter.
    nodes: list[list[int]] = field(default_factory=list)


class _Tree:
    """A draft tree that grows; guesses that begin alike share their nodes."""

    def __init__(self, depth: int) -> None:
        self._most_depth = depth
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._depths: list[int] = []
        self._places: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int | None:
        """The index of a new node; `None` where it would lie too deep."""
        depth = 1 if parent < 0 else self._depths[parent] + 1
        if depth > self._most_depth:
            return None
        self.tokens.append(token)
        self.parents.append(parent)
        self._depths.append(depth)
        self._places[parent, token] = len(self.tokens) - 1
        return len(self.tokens) - 1

    def add_branch(self, tokens: Seq[int]) -> None:
        parent = -1
        for token in tokens:
            known = self._places.get((parent, token))
            added = self.add(parent, token) if known is None else known
            if added is None:
                return
            parent = added


class LookaheadDrafter:
    """The trees of lookahead decoding; what it keeps of a sequence are its window and its pool."""

    reads_hidden = False

    def __init__(self, window: int, ngram: int, guesses: int, *, pool_from_prompt: bool) -> None:
        self._width, self._levels, self._guesses = window, ngram - 1, guesses
        self._from_prompt = pool_from_prompt
        self.num_nodes = (window + guesses) * (ngram - 1)
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
        window.pool.add_text(sequence.tokens, window.num_seen)
        window.num_seen = len(sequence.tokens)
        tree = _Tree(depth)
        window.nodes = self._columns(window, tree)
        for guess in window.pool.after(sequence.tokens[-1]):
            tree.add_branch(guess)
        return DraftTree(tuple(tree.tokens), tuple(tree.parents))

    def _begin(self, sequence: Sequence) -> Window:
        rng = random.Random(sequence.request.sampling.seed)
        levels = [[rng.choice(sequence.tokens) for _ in range(self._width)] for _ in range(self._levels)]
        seen = 0 if self._from_prompt else sequence.num_prompt_tokens
        return Window(levels, rng, NgramPool(self._levels, self._guesses), seen)

    def _columns(self, window: Window, tree: _Tree) -> list[list[int]]:
        line: list[int] = []
        for token in window.levels[0]:
            node = tree.add(line[-1] if line else -1, token)
            if node is None:
                break
            line.append(node)
        columns = [[node] for node in line]
        for column, nodes in enumerate(columns):
            for level in window.levels[1:]:
                node = tree.add(nodes[-1], level[column])
                if node is None:
                    break
                nodes.append(node)
        return columns

    def _move(self, window: Window, verified: Verified) -> None:
        """One iteration on: every level becomes the one below it, the target's tokens the last one.

        A level then guesses one position less far ahead, which one new token of the text makes good; for each further
        one the window loses its first column and gets a fresh last one.
        """
        draws = verified.draws
        newest = []
        for column in range(self._width):
            nodes = window.nodes[column] if column < len(window.nodes) else []
            drawn = len(nodes) == self._levels and nodes[-1] + 1 < len(draws)
            newest.append(draws[nodes[-1] + 1] if drawn else self._any(window, verified))
            if drawn:
                first, *others = [level[column] for level in window.levels]
                window.pool.add(first, (*others, newest[-1]))
        passed = min(len(verified.token_ids) - 1, self._width)
        levels = [*window.levels[1:], newest]
        fresh = [[self._any(window, verified) for _ in range(passed)] for _ in levels]
        window.levels = [[*level[passed:], *more] for level, more in zip(levels, fresh, strict=True)]
        window.nodes = []

    @staticmethod
    def _any(window: Window, verified: Verified) -> int:
        """Some token of the text, where nothing better is known."""
        return window.rng.choice(verified.entry.sequence.tokens)
