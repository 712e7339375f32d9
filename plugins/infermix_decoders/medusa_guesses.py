"""What Medusa heads say behind hidden states, in the order of a tree's nodes: launched, or replayed from graphs."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from infermix_decoders.lane_rows import to_device
from infermix_decoders.medusa_heads import MedusaHeads
from infermix_decoders.medusa_tree import TreeShape
from infermix_decoders.replayed import MOST_GRAPHS, Replayed, holding, powers, thinned


class HeadGuesses(Replayed):
    """The guesses of all nodes of a tree behind some hidden states.

    Captured, they are made for few numbers of rows: the rows that are asked for are brought to one place first, and
    what is guessed of others that were there before is nobody's.
    """

    def __init__(self, heads: MedusaHeads, shape: TreeShape, max_num_seqs: int, output: Tensor) -> None:
        """`output [V, D]` is the model's own head, whose device and dtype the heads have."""
        self.batches = powers(1, max_num_seqs)
        while len(self.batches) > MOST_GRAPHS:
            self.batches = thinned(self.batches)
        super().__init__((size,) for size in self.batches)
        self._heads, self._num_ranks = heads, max(shape.ranks) + 1
        self._hidden = output.new_zeros(max_num_seqs, output.shape[1])
        # Where node i's guess lies among those of all heads, one head after the other.
        places = [(depth - 1) * self._num_ranks + rank for depth, rank in zip(shape.depths, shape.ranks, strict=True)]
        self._places = to_device(places, output.device)

    def __call__(self, hidden: Tensor, rows: Seq[int]) -> Tensor:
        """Tokens `[n, num_nodes]` behind rows of `hidden [N, D]`; to be read before the next call."""
        chosen = to_device(rows, hidden.device)
        if not self._captured:
            return self._guessed(hidden.index_select(0, chosen))
        count = len(rows)
        if hidden.dtype != self._hidden.dtype:
            hidden = hidden.to(self._hidden.dtype)
        torch.index_select(hidden, 0, chosen, out=self._hidden[:count])
        batch = holding(self.batches, count)
        guesses: Tensor = self.run(batch)
        return guesses[:count] if count < batch else guesses

    def work(self, *shape: int) -> Tensor:
        return self._guessed(self._hidden[: shape[0]])

    def _guessed(self, hidden: Tensor) -> Tensor:
        return self._heads.best(hidden, self._num_ranks).flatten(1).index_select(1, self._places)
