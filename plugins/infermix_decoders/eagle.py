"""Drafts of an EAGLE layer: hidden states of the target go in, guessed ones come out, and grow a tree of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from infermix.roles.decoder import Forward
from infermix.roles.request import Sequence
from infermix.toolkit.tree_verification import DraftTree, Verified

from infermix_decoders.eagle_cache import EagleCache
from infermix_decoders.eagle_extension import PaddedExtensions, Pairs, PlainExtensions
from infermix_decoders.eagle_rounds import Rounds
from infermix_decoders.lane_rows import LaneRows, lanes_of


class EagleDrafter:
    """A `TreeDrafter`. Reads the device once a step.

    `together` takes the new pairs of sequences that have at most so many (`most`) at once, `alone` those of a prompt.
    """

    reads_hidden = True
    by_level = True

    def __init__(
        self, cache: EagleCache, latest: LaneRows, rounds: Rounds,
        together: PlainExtensions | PaddedExtensions, alone: PlainExtensions, *,
        depth: int, num_nodes: int,
    ) -> None:  # fmt: skip
        self._cache, self._latest, self._rounds = cache, latest, rounds
        self._together, self._alone = together, alone
        self._depth, self.num_nodes = depth, num_nodes

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> Seq[DraftTree]:
        known = self._latest.known_of(sequences)
        if not known:
            return [DraftTree()] * len(sequences)
        trees = self._grow(known)
        if len(known) < len(sequences):
            made, none = dict(zip((each.seq_id for each in known), trees, strict=True)), DraftTree()
            trees = [made.get(sequence.seq_id, none) for sequence in sequences]
        if min(depths) >= self._depth:
            return trees
        return [tree.within(depth) for tree, depth in zip(trees, depths, strict=True)]

    def observe(self, verified: Seq[Verified], forward: Forward) -> None:
        """Let the layer see what is new, and keep its guess of the feature behind."""
        assert forward.hidden is not None
        new = [self._pairs(each, forward) for each in verified]
        few = [pairs for pairs in new if len(pairs.rows) <= self._together.most]
        if few:
            self._together(few, forward.hidden)
        if len(few) < len(new):
            for pairs in new:
                if len(pairs.rows) > self._together.most:
                    self._alone([pairs], forward.hidden)
        # Rows of those inside a prompt are written, too, and overwritten before anybody knows the sequence.
        self._latest.note(pairs.sequence for pairs in new if pairs.ended)

    def forget(self, sequence: Sequence) -> None:
        self._latest.forget(sequence)
        self._cache.forget(sequence)

    def _grow(self, sequences: list[Sequence]) -> list[DraftTree]:
        # The next pair is of the feature that was guessed behind the last token, and of a guess of what follows it.
        nexts = [len(sequence.tokens) - 1 for sequence in sequences]
        made = self._rounds(lanes_of(sequences), self._cache.counts(sequences), nexts)
        # Slices of one tuple are tuples: no list is made of each row first.
        flat, size = tuple(made.flatten().tolist()), self.num_nodes
        return [
            DraftTree(flat[first : first + size], flat[first + size : first + 2 * size])
            for first in range(0, len(flat), 2 * size)
        ]

    def _pairs(self, each: Verified, forward: Forward) -> Pairs:
        """Each new hidden state with the token behind it, which the prompt or the draw has told."""
        sequence, tokens = each.entry.sequence, each.token_ids
        rows = each.rows(forward)
        count = len(rows)
        if count != len(tokens):  # more than one token of its own
            tokens = (*sequence.tokens[each.start + 1 :], *tokens)[:count]
        return Pairs(sequence, rows, tokens, each.start, self._cache.grow(sequence, count), bool(each.token_ids))
