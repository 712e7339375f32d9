"""Typical acceptance: a guess stays where the target finds it likely enough, whatever it would have drawn.

The rule of Medusa (Cai et al., 2024, section 2.3.1): likelier than `min(epsilon, delta * exp(-H))`, with the
entropy H of the target's distribution there. Lossy: what is emitted does not follow the target's distribution. The
token behind the longest accepted branch is drawn from the target; a greedy request has distributions of a single
token, so that it gets the tokens of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from infermix.roles.decoder import Forward, Sampler
from infermix.toolkit.tree_verification import DraftTree, TreeDecoder, TreeTicket, branch_prefixes, tree_of
from infermix.toolkit.verification import Drafted
from torch import Tensor


class TypicalTreeDecoder(TreeDecoder):
    """Accepts by likelihood instead of equality."""

    def __init__(self, *given: Any, epsilon: float, delta: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self._epsilon, self._delta = epsilon, delta

    def _judge(self, forward: Forward, emitting: Seq[Drafted], sampler: Sampler) -> list[float]:
        """Of every row: the log-likelihood of its guess under its parent's row, -inf where it does not stay."""
        trees = [tree_of(row) for row in emitting]
        p = sampler.probabilities(forward, branch_prefixes(emitting))
        parents, tokens = _parent_rows(trees)
        judged = typical_scores(p, parents.to(p.device), tokens.to(p.device), self._epsilon, self._delta)
        return judged.tolist()

    def _path(self, row: Drafted, draws: Seq[int], span: slice, ticket: TreeTicket) -> tuple[int, ...]:
        return longest_branch(tree_of(row).first(row.num_real), ticket.judged[span][1:])


def typical_scores(p: Tensor, parents: Tensor, tokens: Tensor, epsilon: float, delta: float) -> Tensor:
    """`p [R, V]`, for every row its parent's row `[R]` and its token `[R]` -> log-likelihood `[R]`, or -inf."""
    entropy = -torch.special.xlogy(p, p).sum(-1)
    least = (delta * torch.exp(-entropy)).clamp(max=epsilon)
    likelihood = p[parents, tokens]
    return torch.where(likelihood > least[parents], likelihood.log(), float("-inf"))


def longest_branch(tree: DraftTree, scores: Seq[float]) -> tuple[int, ...]:
    """The deepest branch of accepted guesses, the likeliest of several."""
    ends: dict[int, tuple[int, float, tuple[int, ...]]] = {-1: (0, 0.0, ())}
    for node, (parent, score) in enumerate(zip(tree.parents, scores, strict=False)):
        if parent in ends and score > float("-inf"):
            depth, total, path = ends[parent]
            ends[node] = (depth + 1, total + score, (*path, node))
    return max(ends.values(), key=lambda end: end[:2])[2]


def _parent_rows(trees: Seq[DraftTree]) -> tuple[Tensor, Tensor]:
    """Rows of all trees, each with a first row for the text itself, which is its own parent."""
    parents: list[int] = []
    tokens: list[int] = []
    for tree in trees:
        first = len(parents)
        parents += [first, *(first + 1 + parent for parent in tree.parents)]
        tokens += [0, *tree.tokens]
    return torch.tensor(parents), torch.tensor(tokens)
