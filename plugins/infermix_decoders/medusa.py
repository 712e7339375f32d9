"""Drafts of Medusa heads: every head guesses from the last hidden state alone, and a fixed tree combines them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from infermix.roles.decoder import Forward
from infermix.roles.request import Sequence
from infermix.toolkit.tree_verification import DraftTree, Verified
from torch import Tensor

from infermix_decoders.medusa_guesses import HeadGuesses
from infermix_decoders.medusa_tree import TreeShape


class MedusaDrafter:
    """A `TreeDrafter`. Reads the device once per step.

    The heads are asked as soon as the hidden states are there, and read when a tree is wanted: until then the device
    works while the host gets on with the step.
    """

    reads_hidden = True

    def __init__(self, guesses: HeadGuesses, shape: TreeShape) -> None:
        self._guesses, self._shape, self._shallower = guesses, shape, _shallower(shape)
        self.num_nodes = len(shape.parents)
        #: Guesses of sequences that are on the host.
        self._known: dict[int, list[int]] = {}
        #: Those that are on the device, `[n, num_nodes]`, and whose each row is: `None` of one that is gone.
        self._unread: tuple[list[int | None], Tensor] | None = None

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> Seq[DraftTree]:
        self._read()
        return [
            self._tree(self._known.get(sequence.seq_id), depth)
            for sequence, depth in zip(sequences, depths, strict=True)
        ]

    def observe(self, verified: Seq[Verified], forward: Forward) -> None:
        """Let the heads guess how each sequence goes on."""
        ended = [each for each in verified if each.token_ids]
        if not ended:
            return
        self._read()
        assert forward.hidden is not None
        made = self._guesses(forward.hidden, [each.last_row(forward) for each in ended])
        self._unread = [each.entry.sequence.seq_id for each in ended], made

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence.seq_id, None)
        if self._unread is not None and sequence.seq_id in self._unread[0]:
            owners = self._unread[0]
            owners[owners.index(sequence.seq_id)] = None

    def _read(self) -> None:
        if self._unread is None:
            return
        owners, made = self._unread
        self._unread = None
        self._known.update(
            (owner, tokens) for owner, tokens in zip(owners, made.tolist(), strict=True) if owner is not None
        )

    def _tree(self, tokens: list[int] | None, depth: int) -> DraftTree:
        """`tokens` of all nodes, or none."""
        if tokens is None:
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
