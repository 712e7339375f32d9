"""Drafts of an EAGLE layer: hidden states of the target go in, guessed ones come out, and grow a tree of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from infermix.roles.decoder import Forward
from infermix.roles.request import Sequence
from infermix.toolkit.tree_verification import DraftTree, Verified

from infermix_decoders.eagle_cache import EagleCache, causal_places
from infermix_decoders.eagle_layer import EagleDraft
from infermix_decoders.eagle_rounds import Rounds
from infermix_decoders.lane_rows import LaneRows, lanes_of, lists_to_device

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


class EagleDrafter:
    """A `TreeDrafter`. `embed` is the target's own, or the checkpoint's. Reads the device once a step."""

    reads_hidden = True

    def __init__(
        self, draft: EagleDraft, embed: Any, cache: EagleCache, latest: LaneRows, rounds: Rounds, *,
        depth: int, num_nodes: int,
    ) -> None:  # fmt: skip
        self._draft, self._embed = draft, embed
        self._cache, self._latest, self._rounds = cache, latest, rounds
        self._depth, self.num_nodes = depth, num_nodes

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> Seq[DraftTree]:
        known = [sequence for sequence in sequences if self._latest.knows(sequence)]
        if not known:
            return [DraftTree()] * len(sequences)
        made = dict(zip((sequence.seq_id for sequence in known), self._grow(known), strict=True))
        return [
            _within(made.get(sequence.seq_id, DraftTree()), depth, self._depth)
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
        sequences, seen = [pairs.sequence for pairs in group], [self._cache.count(pairs.sequence) for pairs in group]
        rows, ids, lanes, past, starts, lasts = lists_to_device(
            device,
            [row for p, pad in zip(group, padding, strict=True) for row in [*p.rows, *[0] * pad]],
            [token for p, pad in zip(group, padding, strict=True) for token in [*p.tokens, *[0] * pad]],
            lanes_of(sequences), seen, [pairs.start for pairs in group],
            [index * width + len(pairs.rows) - 1 for index, pairs in enumerate(group)],
        )  # fmt: skip
        places, visible = causal_places(past, width, max(seen) + width)
        positions = starts[:, None] + torch.arange(width, device=device)
        features = forward.hidden.index_select(0, rows).unflatten(0, (-1, width))
        embedded = self._embed(ids).unflatten(0, (-1, width))
        attention = self._cache.attention(lanes, self._cache.slots(lanes, places), visible)
        guessed = self._draft(features, embedded, positions, attention)
        for pairs in group:
            self._cache.grow(pairs.sequence, len(pairs.rows))
        # Of one inside a prompt, too: it is overwritten before anybody knows the sequence.
        self._latest.put(
            [pairs.sequence for pairs in group if pairs.ended], lanes, guessed.flatten(0, 1).index_select(0, lasts)
        )

    def _grow(self, sequences: list[Sequence]) -> list[DraftTree]:
        # The next pair is of the feature that was guessed behind the last token, and of a guess of what follows it.
        nexts = [len(sequence.tokens) - 1 for sequence in sequences]
        counts = [self._cache.count(sequence) for sequence in sequences]
        made = self._rounds(lanes_of(sequences), counts, nexts).tolist()
        return [DraftTree(tuple(tokens), tuple(parents)) for tokens, parents in made]


def _within(tree: DraftTree, depth: int, grown: int) -> DraftTree:
    return tree if depth >= grown else tree.within(depth)


def _pairs(each: Verified, forward: Forward) -> Pairs:
    """Each new hidden state with the token behind it, which the prompt or the draw has told."""
    sequence, rows = each.entry.sequence, each.rows(forward)
    known = [*sequence.tokens[each.start + 1 :], *each.token_ids]
    return Pairs(sequence, rows, known[: len(rows)], each.start, bool(each.token_ids))
