"""Drafts of an EAGLE layer: hidden states of the target go in, guessed ones come out, and grow a tree of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from infermix.roles.decoder import Forward
from infermix.roles.request import Sequence
from infermix.toolkit.tree_verification import DraftTree, Verified
from torch import Tensor

from infermix_decoders.eagle_cache import EagleCache, causal_places
from infermix_decoders.eagle_layer import EagleDraft
from infermix_decoders.eagle_tree import grow_tree
from infermix_decoders.lane_rows import LaneRows, to_device

#: New pairs of a sequence that are computed together with those of others; more are a prompt, computed alone.
FEW = 16


@dataclass(frozen=True, slots=True)
class Pairs:
    """What the target said of a sequence: `rows` of hidden states, the tokens behind them, the first position."""

    sequence: Sequence
    rows: list[int]
    tokens: list[int]
    start: int
    ended: bool


@dataclass(slots=True)
class _Round:
    """One round of guessing for B sequences: `past [B]` seen pairs, and what guesses of the depth before see."""

    lanes: Tensor
    past: Tensor
    positions: Tensor
    features: Tensor
    reach: int
    ancestors: Tensor | None = None


class EagleDrafter:
    """A `TreeDrafter`. `embed` and `head` are the target's own, or the checkpoint's. Reads the device once a step."""

    reads_hidden = True

    def __init__(
        self, draft: EagleDraft, embed: Any, head: Any, cache: EagleCache, latest: LaneRows, *,
        beam: int, depth: int, num_nodes: int,
    ) -> None:  # fmt: skip
        self._draft, self._embed, self._head = draft, embed, head
        self._cache, self._latest = cache, latest
        self._beam, self._depth = beam, depth
        self.num_nodes = num_nodes

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> Seq[DraftTree]:
        known = [sequence for sequence in sequences if self._latest.knows(sequence)]
        if not known:
            return [DraftTree()] * len(sequences)
        made = dict(zip((sequence.seq_id for sequence in known), self._grow(known), strict=True))
        return [
            made[sequence.seq_id].within(depth) if sequence.seq_id in made else DraftTree()
            for sequence, depth in zip(sequences, depths, strict=True)
        ]

    def observe(self, verified: Seq[Verified], forward: Forward) -> None:
        """Let the layer see what is new, and keep its guess of the feature behind."""
        new = [_pairs(each, forward) for each in verified]
        few = [pairs for pairs in new if len(pairs.rows) <= FEW]
        for group in ([few] if few else []) + [[pairs] for pairs in new if len(pairs.rows) > FEW]:
            self._extend(group, forward)

    def forget(self, sequence: Sequence) -> None:
        self._latest.forget(sequence)
        self._cache.forget(sequence)

    def _extend(self, group: list[Pairs], forward: Forward) -> None:
        assert forward.hidden is not None
        device, width = forward.hidden.device, max(len(pairs.rows) for pairs in group)
        padding = [width - len(pairs.rows) for pairs in group]
        rows = to_device(
            [row for p, pad in zip(group, padding, strict=True) for row in [*p.rows, *[0] * pad]], device
        )
        ids = to_device([t for p, pad in zip(group, padding, strict=True) for t in [*p.tokens, *[0] * pad]], device)
        lanes = to_device([pairs.sequence.lane for pairs in group], device)
        past = self._cache.counts([pairs.sequence for pairs in group])
        starts = to_device([pairs.start for pairs in group], device)
        reach = max(self._cache.count(pairs.sequence) for pairs in group) + width
        places, visible = causal_places(past, width, reach)
        positions = starts[:, None] + torch.arange(width, device=device)
        features = forward.hidden.index_select(0, rows).unflatten(0, (-1, width))
        embedded = self._embed(ids).unflatten(0, (-1, width))
        guessed = self._draft(features, embedded, positions, self._cache.attention(lanes, places, visible))
        for pairs in group:
            self._cache.grow(pairs.sequence, len(pairs.rows))
        self._keep_last(group, guessed)

    def _keep_last(self, group: list[Pairs], guessed: Tensor) -> None:
        ended = [(index, pairs) for index, pairs in enumerate(group) if pairs.ended]
        if ended:
            places = [index * guessed.shape[1] + len(pairs.rows) - 1 for index, pairs in ended]
            rows = guessed.flatten(0, 1).index_select(0, to_device(places, guessed.device))
            self._latest.put([pairs.sequence for _, pairs in ended], rows)

    def _grow(self, sequences: list[Sequence]) -> list[DraftTree]:
        features = self._latest.take(sequences)
        # The next pair is of the feature that was guessed behind the last token, and of a guess of what follows it.
        positions = to_device([len(sequence.tokens) - 1 for sequence in sequences], features.device)
        lanes = to_device([sequence.lane for sequence in sequences], features.device)
        reach = max(self._cache.count(sequence) for sequence in sequences)
        going = _Round(lanes, self._cache.counts(sequences), positions, features[:, None], reach)
        first = self._log_probabilities(features)
        tokens, parents = grow_tree(
            first, lambda *given: self._expand(going, *given), min(self._beam, first.shape[-1]), self._depth,
            self.num_nodes,
        )  # fmt: skip
        both = torch.stack((tokens, parents)).tolist()
        return [DraftTree(tuple(own), tuple(above)) for own, above in zip(*both, strict=True)]

    def _expand(self, going: _Round, tokens: Tensor, parents: Tensor, level: int) -> Tensor:
        """Features of a depth's guesses, and log-probabilities behind them; `_Round` then stands for that depth."""
        batch, beam = tokens.shape
        device = tokens.device
        index = torch.arange(beam, device=device)
        own = torch.eye(beam, dtype=torch.bool, device=device).expand(batch, -1, -1)
        if going.ancestors is None:
            features, inherited = going.features.expand(-1, beam, -1), own[:, :, :0]
        else:
            features = going.features.gather(1, parents[..., None].expand(-1, -1, going.features.shape[2]))
            inherited = going.ancestors.gather(1, parents[..., None].expand(-1, -1, going.ancestors.shape[2]))
        going.ancestors = torch.cat((inherited, own), dim=2)
        places = going.past[:, None] + (level - 1) * beam + index
        visible = _visible(going, beam * level)
        positions = (going.positions + level - 1)[:, None].expand(-1, beam)
        attention = self._cache.attention(going.lanes, places, visible)
        going.features = self._draft(features, self._embed(tokens), positions, attention)
        return self._log_probabilities(going.features)

    def _log_probabilities(self, features: Tensor) -> Tensor:
        return torch.log_softmax(self._head(features).float(), dim=-1)


def _visible(going: _Round, num_guesses: int) -> Tensor:
    """`[B, k, reach + num_guesses]`: all seen pairs, and of the guesses behind them those of the same branch."""
    assert going.ancestors is not None
    columns = torch.arange(going.reach + num_guesses, device=going.past.device)
    place = columns - going.past[:, None]
    inside = place.clamp(0, num_guesses - 1)[:, None].expand(-1, going.ancestors.shape[1], -1)
    mine = going.ancestors.gather(2, inside) & ((place >= 0) & (place < num_guesses))[:, None]
    return mine | (place < 0)[:, None]


def _pairs(each: Verified, forward: Forward) -> Pairs:
    """Each new hidden state with the token behind it, which the prompt or the draw has told."""
    sequence, rows = each.entry.sequence, each.rows(forward)
    known = [*sequence.tokens[each.start + 1 :], *each.token_ids]
    return Pairs(sequence, rows, known[: len(rows)], each.start, bool(each.token_ids))
