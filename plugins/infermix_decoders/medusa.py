"""Drafts of Medusa heads: every head guesses from the last hidden state alone, and a fixed tree combines them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from infermix.roles.decoder import Forward
from infermix.roles.request import Sequence
from infermix.toolkit.tree_verification import DraftTree, Verified

from infermix_decoders.lane_rows import LaneRows, to_device
from infermix_decoders.medusa_heads import MedusaHeads
from infermix_decoders.medusa_tree import TreeShape


class MedusaDrafter:
    """A `TreeDrafter`. Reads the device once per step."""

    reads_hidden = True

    def __init__(self, heads: MedusaHeads, shape: TreeShape, latest: LaneRows) -> None:
        self._heads, self._latest = heads, latest
        self.num_nodes = len(shape.parents)
        self._num_ranks = max(shape.ranks) + 1
        self._shapes = {depth: shape.within(depth) for depth in range(1, max(shape.depths) + 1)}

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> Seq[DraftTree]:
        known = [sequence for sequence in sequences if self._latest.knows(sequence)]
        if not known:
            return [DraftTree()] * len(sequences)
        best = self._heads.best(self._latest.take(known), self._num_ranks).tolist()
        guesses = dict(zip((sequence.seq_id for sequence in known), best, strict=True))
        return [
            self._tree(guesses[sequence.seq_id], depth) if sequence.seq_id in guesses else DraftTree()
            for sequence, depth in zip(sequences, depths, strict=True)
        ]

    def observe(self, verified: Seq[Verified], forward: Forward) -> None:
        """Keep the hidden state behind which each sequence goes on."""
        ended = [each for each in verified if each.token_ids]
        if not ended:
            return
        assert forward.hidden is not None
        rows = to_device([each.last_row(forward) for each in ended], forward.hidden.device)
        self._latest.put([each.entry.sequence for each in ended], forward.hidden.index_select(0, rows))

    def forget(self, sequence: Sequence) -> None:
        self._latest.forget(sequence)

    def _tree(self, guesses: list[list[int]], depth: int) -> DraftTree:
        """`guesses[k][r]` is the guess of rank r of head k."""
        shape = self._shapes[min(depth, len(self._shapes))]
        tokens = tuple(guesses[own - 1][rank] for own, rank in zip(shape.depths, shape.ranks, strict=True))
        return DraftTree(tokens, shape.parents)
