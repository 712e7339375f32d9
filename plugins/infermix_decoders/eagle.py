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


@dataclass(slots=True)
class _Round:
    """One round of guessing for B sequences, with room for n guesses each behind the C places that any has seen.

    `behind [B, n]` are the places of guesses in a row of the cache and `slots [B, n]` those in all rows, `seen
    [B, 1, C + n]` tells which places hold what a sequence has seen, `positions [B, depth]` are those of each depth.
    `features` and `ancestors` are those of the guesses of the depth before.
    """

    lanes: Tensor
    behind: Tensor
    slots: Tensor
    seen: Tensor
    positions: Tensor
    features: Tensor
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
        device = latest.device
        self._columns, self._depths = torch.arange(beam * depth, device=device), torch.arange(depth, device=device)
        self._own = torch.eye(beam, dtype=torch.bool, device=device)
        self.num_nodes = num_nodes

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
        going = self._begin(sequences)
        first = self._log_probabilities(going.features[:, 0])
        tokens, parents = grow_tree(
            first, lambda *given: self._expand(going, *given), min(self._beam, first.shape[-1]), self._depth,
            self.num_nodes,
        )  # fmt: skip
        both = torch.stack((tokens, parents)).tolist()
        return [DraftTree(tuple(own), tuple(above)) for own, above in zip(*both, strict=True)]

    def _begin(self, sequences: list[Sequence]) -> _Round:
        """What all depths have in common is computed once: on a GPU every small operator is a launch."""
        # The next pair is of the feature that was guessed behind the last token, and of a guess of what follows it.
        nexts = [len(sequence.tokens) - 1 for sequence in sequences]
        counts = [self._cache.count(sequence) for sequence in sequences]
        lanes, past, positions = lists_to_device(self._latest.device, lanes_of(sequences), counts, nexts)
        behind = past[:, None] + self._columns
        reach = max(counts) + self._columns.shape[0]
        return _Round(
            lanes=lanes,
            behind=behind,
            slots=self._cache.slots(lanes, behind),
            seen=torch.arange(reach, device=past.device) < past[:, None, None],
            positions=positions[:, None] + self._depths,
            features=self._latest.take(lanes)[:, None],
        )

    def _expand(self, going: _Round, tokens: Tensor, parents: Tensor, level: int) -> Tensor:
        """Features of a depth's guesses, and log-probabilities behind them; `_Round` then stands for that depth."""
        batch, beam = tokens.shape
        own, above = self._own[:beam, :beam].expand(batch, -1, -1), parents[..., None]
        if going.ancestors is None:
            features, going.ancestors = going.features.expand(-1, beam, -1), own
        else:
            features = going.features.gather(1, above.expand(-1, -1, going.features.shape[2]))
            inherited = going.ancestors.gather(1, above.expand(-1, -1, going.ancestors.shape[2]))
            going.ancestors = torch.cat((inherited, own), dim=2)
        slots = going.slots[:, (level - 1) * beam : level * beam]
        positions = going.positions[:, level - 1, None].expand(-1, beam)
        attention = self._cache.attention(going.lanes, slots, _visible(going, beam * level, self._columns.shape[0]))
        going.features = self._draft(features, self._embed(tokens), positions, attention)
        return self._log_probabilities(going.features)

    def _log_probabilities(self, features: Tensor) -> Tensor:
        return torch.log_softmax(self._head(features), dim=-1, dtype=torch.float32)


def _visible(going: _Round, num_guesses: int, most_guesses: int) -> Tensor:
    """`[B, k, C + num_guesses]`: all seen pairs, and of the guesses behind them those of the same branch."""
    assert going.ancestors is not None
    num_columns = going.seen.shape[2] - most_guesses + num_guesses
    visible = going.seen[:, :, :num_columns].repeat(1, going.ancestors.shape[1], 1)
    return visible.scatter_(2, going.behind[:, None, :num_guesses].expand_as(going.ancestors), going.ancestors)


def _within(tree: DraftTree, depth: int, grown: int) -> DraftTree:
    return tree if depth >= grown else tree.within(depth)


def _pairs(each: Verified, forward: Forward) -> Pairs:
    """Each new hidden state with the token behind it, which the prompt or the draw has told."""
    sequence, rows = each.entry.sequence, each.rows(forward)
    known = [*sequence.tokens[each.start + 1 :], *each.token_ids]
    return Pairs(sequence, rows, known[: len(rows)], each.start, bool(each.token_ids))
