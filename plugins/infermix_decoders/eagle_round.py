"""One round of guessing on the device: from what the draft layer has seen of some texts to a tree behind each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infermix_decoders.eagle_cache import EagleCache, masked_attention
from infermix_decoders.eagle_layer import EagleDraft
from infermix_decoders.eagle_tree import grow_tree
from infermix_decoders.lane_rows import LaneRows


class GuessingRound:
    """Tensors in, a tensor out, nothing else is changed and the host is not asked: so that it can be captured.

    Guesses go into a copy of what the rounds' rows have seen, never into the cache. So a row that pads a batch may
    name any lane. `embed` and `head` are the target's own, or the checkpoint's. `beam` is at most the vocabulary.
    """

    def __init__(
        self, draft: EagleDraft, embed: Any, head: Any, cache: EagleCache, latest: LaneRows, *,
        beam: int, depth: int, num_nodes: int,
    ) -> None:  # fmt: skip
        self._draft, self._embed, self._head = draft, embed, head
        self._cache, self._latest = cache, latest
        self._beam, self._depth, self._num_nodes = beam, depth, num_nodes
        device = latest.device
        self._columns, self._depths = torch.arange(cache.capacity, device=device), torch.arange(depth, device=device)
        self._own = torch.eye(beam, dtype=torch.bool, device=device)

    @property
    def room(self) -> int:
        """Guesses that the layer looks at behind a text: those of the last depth are never followed."""
        return room_for_guesses(self._beam, self._depth)

    def __call__(self, lanes: Tensor, counts: Tensor, positions: Tensor, reach: int) -> Tensor:
        """Tokens and parents `[B, 2, num_nodes]` of a tree behind each of the rows `lanes [B]`.

        Of a row the layer has seen `counts [B]` pairs, and `positions [B]` is that of the next one. `reach` are the
        places of a row that are looked at: at least the largest count and `room`, at most the cache's capacity.
        """
        going = self._begin(lanes, counts, positions, reach)
        first = self._log_probabilities(going.features[:, 0])
        made = grow_tree(first, lambda *given: self._expand(going, *given), self._beam, self._depth, self._num_nodes)
        return torch.stack(made, dim=1)

    def _begin(self, lanes: Tensor, counts: Tensor, positions: Tensor, reach: int) -> _Going:
        """What all depths have in common is computed once: every small operator is a launch."""
        keys, values = self._cache.copies(lanes, reach)
        return _Going(
            keys=keys,
            values=values,
            positions=positions[:, None] + self._depths,
            guesses_at=reach - self.room,
            features=self._latest.take(lanes)[:, None],
            visible=self._columns[:reach] < counts[:, None, None],
        )

    def _expand(self, going: _Going, tokens: Tensor, parents: Tensor, level: int) -> Tensor:
        """Features of a depth's guesses, and log-probabilities behind them; `_Going` then stands for that depth."""
        first, above = going.guesses_at + (level - 1) * self._beam, parents[..., None]
        own = slice(first, first + self._beam)
        features, going.visible = (
            each.gather(1, above.expand(-1, -1, each.shape[2])) for each in (going.features, going.visible)
        )
        going.visible[:, :, own] = self._own

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            going.keys[:, own], going.values[:, own] = k, v
            return masked_attention(q, going.keys, going.values, going.visible)

        going.features = self._draft(features, self._embed(tokens), going.positions[:, level - 1, None], attend)
        return self._log_probabilities(going.features)

    def _log_probabilities(self, features: Tensor) -> Tensor:
        return torch.log_softmax(self._head(features), dim=-1, dtype=torch.float32)


@dataclass(slots=True)
class _Going:
    """A round of B sequences over C places each, the last of which, from `guesses_at` on, are for guesses.

    `keys`, `values [B, C, Hkv, D]` are the round's own; `positions [B, depth]` are those of each depth. `features
    [B, k, D]` and what is `visible [B, k, C]` are those of the guesses of the depth before, at first of the text.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    guesses_at: int
    features: Tensor
    visible: Tensor


def room_for_guesses(beam: int, depth: int) -> int:
    return beam * (depth - 1)
