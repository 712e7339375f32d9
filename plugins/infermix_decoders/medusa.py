"""Drafts of Medusa heads: every head guesses from the last hidden state alone, and a fixed tree combines them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from infermix.roles.decoder import Forward
from infermix.roles.request import Sequence
from infermix.toolkit.tree_verification import DraftTree, Verified

from infermix_decoders.lane_rows import LaneRows, lanes_of, lists_to_device, to_device
from infermix_decoders.medusa_heads import MedusaHeads
from infermix_decoders.medusa_tree import TreeShape


class MedusaDrafter:
    """A `TreeDrafter`. Reads the device once per step."""

    reads_hidden = True

    def __init__(self, heads: MedusaHeads, shape: TreeShape, latest: LaneRows) -> None:
        self._heads, self._latest = heads, latest
        self.num_nodes = len(shape.parents)
        self._num_ranks = max(shape.ranks) + 1
        self._shape, self._shallower = shape, _shallower(shape)
        # Where node i's guess lies among those of all heads, one head after the other.
        places = [(depth - 1) * self._num_ranks + rank for depth, rank in zip(shape.depths, shape.ranks, strict=True)]
        self._places = to_device(places, latest.device)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> Seq[DraftTree]:
        known = [sequence for sequence in sequences if self._latest.knows(sequence)]
        if not known:
            return [DraftTree()] * len(sequences)
        lanes = to_device(lanes_of(known), self._latest.device)
        best = self._heads.best(self._latest.take(lanes), self._num_ranks)
        guesses = best.flatten(1).index_select(1, self._places).tolist()
        if len(known) < len(sequences):
            made = {sequence.seq_id: tokens for sequence, tokens in zip(known, guesses, strict=True)}
            guesses = [made.get(sequence.seq_id, []) for sequence in sequences]
        return [self._tree(tokens, depth) for tokens, depth in zip(guesses, depths, strict=True)]

    def observe(self, verified: Seq[Verified], forward: Forward) -> None:
        """Keep the hidden state behind which each sequence goes on."""
        ended = [each for each in verified if each.token_ids]
        if not ended:
            return
        assert forward.hidden is not None
        sequences = [each.entry.sequence for each in ended]
        places = [each.last_row(forward) for each in ended]
        lanes, rows = lists_to_device(forward.hidden.device, lanes_of(sequences), places)
        self._latest.put(sequences, lanes, forward.hidden.index_select(0, rows))

    def forget(self, sequence: Sequence) -> None:
        self._latest.forget(sequence)

    def _tree(self, tokens: list[int], depth: int) -> DraftTree:
        """`tokens` of all nodes, or none."""
        if not tokens:
            return DraftTree()
        if depth > len(self._shallower):
            return DraftTree(tuple(tokens), self._shape.parents)
        kept, parents = self._shallower[depth - 1]
        return DraftTree(tuple(tokens[node] for node in kept), parents)


def _shallower(shape: TreeShape) -> list[tuple[list[int], tuple[int, ...]]]:
    """For every depth below the shape's own: the nodes that are left, and their parents."""
    return [
        ([node for node, own in enumerate(shape.depths) if own <= depth], shape.within(depth).parents)
        for depth in range(1, max(shape.depths))
    ]
