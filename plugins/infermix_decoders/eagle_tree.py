"""The dynamic tree of EAGLE-2 (Li et al., 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft
Trees"): expanded where the draft is sure of itself, then cut down to the likeliest guesses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: `expand(tokens [B, k], parents [B, k], depth) -> log-probabilities [B, k, V]` of what follows each guess.
#: `parents` index the beam of the depth before (0 at depth 1).
Expand = Callable[[Tensor, Tensor, int], Tensor]


def grow_tree(first: Tensor, expand: Expand, beam: int, depth: int, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Tokens and parents `[B, num_nodes]` of the likeliest guesses; a parent is an earlier column, or -1.

    `first [B, V]` are log-probabilities behind the text. Of every depth the `beam` likeliest branches are followed,
    and each of their guesses gets `beam` guesses of its own; a branch is as likely as the product of its guesses.
    """
    scores, tokens = first.topk(beam, dim=-1)
    pool_scores, pool_tokens = [scores], [tokens]
    pool_parents = [torch.full_like(tokens, -1)]
    places = torch.arange(beam, device=first.device).expand_as(tokens)  # of the beam, in the pool
    parents = torch.zeros_like(tokens)
    for level in range(1, depth):
        follow, guesses = expand(tokens, parents, level).topk(beam, dim=-1)
        start = sum(part.shape[1] for part in pool_scores)
        children = (scores[:, :, None] + follow).flatten(1)
        pool_scores.append(children)
        pool_tokens.append(guesses.flatten(1))
        pool_parents.append(places[:, :, None].expand(-1, -1, beam).flatten(1))
        scores, best = children.topk(beam, dim=-1)
        tokens, parents, places = pool_tokens[-1].gather(1, best), best // beam, start + best
    return _likeliest(torch.cat(pool_scores, 1), torch.cat(pool_tokens, 1), torch.cat(pool_parents, 1), num_nodes)


def _likeliest(scores: Tensor, tokens: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best `count` of a pool in which parents come before their children, and are at least as likely.

    The sort is stable, so that of equals the parent is taken first.
    """
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    kept = order.sort(dim=1).values
    place = torch.full_like(scores, -1, dtype=torch.int64)
    place.scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))
    above = parents.gather(1, kept)
    return tokens.gather(1, kept), torch.where(above < 0, above, place.gather(1, above.clamp(min=0)))
