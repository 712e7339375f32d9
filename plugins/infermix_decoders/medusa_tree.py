"""Which guesses of the Medusa heads go into the tree: those that are most often right together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass

#: How often the guess of rank r (from 0) of head k (from 0) is right where nobody measured it: a guess of ours, which
#: falls with both.
_FIRST, _NEXT_HEAD, _NEXT_RANK = 0.55, 0.75, 0.4


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Node i is the guess of rank `ranks[i]` of the head of its depth, behind node `parents[i]` (-1: the text)."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]

    def within(self, depth: int) -> TreeShape:
        """Without the nodes that are deeper."""
        kept = [index for index, own in enumerate(self.depths) if own <= depth]
        place = {-1: -1, **{old: new for new, old in enumerate(kept)}}
        return TreeShape(
            tuple(place[self.parents[index]] for index in kept),
            tuple(self.depths[index] for index in kept),
            tuple(self.ranks[index] for index in kept),
        )


def assumed_accuracy(num_heads: int, num_ranks: int) -> list[list[float]]:
    return [[_FIRST * _NEXT_HEAD**head * _NEXT_RANK**rank for rank in range(num_ranks)] for head in range(num_heads)]


def best_tree(accuracy: Seq[Seq[float]], num_nodes: int) -> TreeShape:
    """The `num_nodes` nodes whose whole branch is most often right, heads being taken as independent (section 2.3.3).

    A node is never more often right than its parent, so taking the best remaining node again and again is optimal.
    """
    parents: list[int] = []
    depths: list[int] = []
    ranks: list[int] = []
    waiting = [(-accuracy[0][rank], -1, 1, rank) for rank in range(len(accuracy[0]))]
    heapq.heapify(waiting)
    while waiting and len(parents) < num_nodes:
        chance, parent, depth, rank = heapq.heappop(waiting)
        node = len(parents)
        parents.append(parent)
        depths.append(depth)
        ranks.append(rank)
        if depth < len(accuracy):
            for deeper, right in enumerate(accuracy[depth]):
                heapq.heappush(waiting, (chance * right, node, depth + 1, deeper))
    return TreeShape(tuple(parents), tuple(depths), tuple(ranks))
