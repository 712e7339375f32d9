"""The draft layer's pass over pairs of feature and token that are new, launched or replayed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from infermix.roles.request import Sequence
from torch import Tensor

from infermix_decoders.eagle_cache import EagleCache, causal_places
from infermix_decoders.eagle_layer import EagleDraft
from infermix_decoders.eagle_rounds import PaddedRounds
from infermix_decoders.lane_rows import LaneRows, on_host, to_device
from infermix_decoders.replayed import Replayed

#: New pairs of a sequence that are computed together with those of others; more are a prompt, computed alone.
FEW = 16


@dataclass(slots=True)
class Pairs:
    """What the target said of a sequence: `rows` of hidden states, the tokens behind them, the first position.

    `seen` pairs of the sequence came before. With `ended` the last pair is the end of its text.
    """

    sequence: Sequence
    rows: Seq[int]
    tokens: Seq[int]
    start: int
    seen: int
    ended: bool


class Extension:
    """One pass, of `B` sequences and `width` pairs each: writes what the cache keeps of the pairs, and into `latest`
    the feature guessed behind the last pair of each.

    Tensors in, and the host is not asked: so that it can be captured. A row of padding has the lane behind the last
    one, which is nobody's. What pads the pairs of a sequence is written behind what it has seen.
    """

    def __init__(self, draft: EagleDraft, embed: Any, cache: EagleCache, latest: LaneRows) -> None:
        self._draft, self._embed, self.cache, self.latest = draft, embed, cache, latest

    @property
    def nobody(self) -> int:
        """The lane of padding."""
        return self.cache.max_num_seqs

    @property
    def device(self) -> torch.device:
        return self.latest.device

    def __call__(self, given: Tensor, features: Tensor, batch: int, reach: int) -> None:
        """`given` as `packed` made it, `features [B * width, D]`; places below `reach` are looked at."""
        lanes, seen, starts, lasts = given[: 4 * batch].split(batch)
        width = features.shape[0] // batch
        places, visible = causal_places(seen, width, reach)
        attention = self.cache.attention(lanes.clamp(max=self.nobody - 1), self.cache.slots(lanes, places), visible)
        embedded = self._embed(ids_of(given, batch, width)).unflatten(0, (batch, width))
        positions = places + (starts - seen)[:, None]
        guessed = self._draft(features.unflatten(0, (batch, width)), embedded, positions, attention)
        self.latest.write(lanes, guessed.flatten(0, 1).index_select(0, lasts))


class PlainExtensions:
    """Each as large as it must be, launched operator by operator."""

    most = FEW

    def __init__(self, extension: Extension) -> None:
        self.extension = extension

    def __call__(self, group: Seq[Pairs], hidden: Tensor) -> None:
        """Show the layer the pairs, whose features are among `hidden [N, D]`."""
        batch, width = len(group), max(len(pairs.rows) for pairs in group)
        given = to_device(packed(group, batch, width), self.extension.device)
        features = hidden.index_select(0, rows_of(given, batch, width))
        self.extension(given, features, batch, max(pairs.seen for pairs in group) + width)


class PaddedExtensions(Replayed):
    """Passes of few shapes, with `most` pairs of each sequence, that read everything from one place on the device.

    The hidden states of a step lie anywhere, so those that are read are brought there first. Who was shown pairs is
    most often who gets a tree next: what `rounds` wants to know of them is sent in the same copy.
    """

    def __init__(self, extension: Extension, rounds: PaddedRounds, most: int) -> None:
        """`rounds` with room for `numbers_of(most)` beside each row."""
        super().__init__(rounds.shapes)
        self.shapes, self.extension, self.most, self._rounds = rounds.shapes, extension, most, rounds
        self._features = extension.latest.like(self.shapes.batches[-1] * most)
        self._parts = {batch: self._parts_of(batch) for batch in self.shapes.batches}

    def __call__(self, group: Seq[Pairs], hidden: Tensor) -> None:
        batch, reach = self.shapes.holding(len(group), max([pairs.seen for pairs in group]) + self.most)
        _, rows, features = self._parts[batch]
        self._send(group, batch)
        if hidden.dtype != features.dtype:
            hidden = hidden.to(features.dtype)
        torch.index_select(hidden, 0, rows, out=features)
        self.run(batch, reach)

    def work(self, *shape: int) -> None:
        batch, reach = shape
        given, _, features = self._parts[batch]
        self.extension(given, features, batch, reach)

    def _send(self, group: Seq[Pairs], batch: int) -> None:
        lanes = [pairs.sequence.lane for pairs in group]
        counts = [pairs.seen + len(pairs.rows) for pairs in group]
        nexts = [pairs.start + len(pairs.rows) for pairs in group]
        values = self._rounds.lists(batch, lanes, counts, nexts)
        values += packed(group, batch, self.most, self.extension.nobody)
        place = self._rounds.places[batch]
        place.copy_(on_host(values, place.device), non_blocking=True)
        self._rounds.sent = lanes, counts, nexts

    def _parts_of(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of so many sequences: all numbers, those of them that are rows of hidden states, and the features there."""
        given = self._rounds.places[batch][3 * batch :]
        return given, rows_of(given, batch, self.most), self._features[: batch * self.most]


def numbers_of(most: int) -> int:
    """What `packed` makes of a sequence."""
    return 4 + 2 * most


def packed(group: Seq[Pairs], batch: int, width: int, nobody: int = 0) -> list[int]:
    """Lanes, pairs seen, first positions and places of the last pairs, `batch` each; rows and tokens of pairs,
    `width` of each sequence. One list, for one copy to the device.
    """
    zeros = (0,) * width
    rows: list[int] = []
    ids: list[int] = []
    lasts = []
    first = -1
    for pairs in group:
        count = len(pairs.rows)
        lasts.append(first + count)
        first += width
        rows += pairs.rows
        ids += pairs.tokens
        if count < width:
            rows += zeros[count:]
            ids += zeros[count:]
    more = (0,) * (batch - len(group))
    nothing = (0,) * (width * len(more))
    return [
        *[pairs.sequence.lane for pairs in group], *[nobody] * len(more), *[pairs.seen for pairs in group], *more,
        *[pairs.start for pairs in group], *more, *lasts, *more, *rows, *nothing, *ids, *nothing,
    ]  # fmt: skip


def rows_of(given: Tensor, batch: int, width: int) -> Tensor:
    """Of `packed` numbers: the rows of hidden states `[B * width]`."""
    return given[4 * batch : (4 + width) * batch]


def ids_of(given: Tensor, batch: int, width: int) -> Tensor:
    """Of `packed` numbers: the tokens `[B * width]`."""
    return given[(4 + width) * batch : (4 + 2 * width) * batch]
