"""The best continuations of groups of beams: found operator by operator, or replayed from graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import chain
from typing import Any

import numpy as np
import torch
from infermix.roles.decoder import Captured
from torch import Tensor

from infermix_decoders.replayed import MOST_GRAPHS, Replayed, holding, powers, thinned

#: Logits that replays read at once, at most; steps with more are launched.
_MOST_NUMBERS = 1 << 26


def rated(logits: Tensor) -> Tensor:
    """Log-probabilities, fp32 `[R, V]`."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def rank(own: Tensor, before: Tensor, num_groups: int, count: int) -> tuple[Tensor, Tensor]:
    """What `Best` reads, int64 `[3, num_groups, k]`, and the same scores in fp32.

    `own [num_groups * num_rows, V]` are log-probabilities of rows, `before [num_groups * num_rows, 1]` their scores
    up to here. No row gives more than `count`, and to look for these in each row first is much faster than among all
    continuations of a group.
    """
    best, tokens = own.topk(min(count, own.shape[-1]), dim=-1)
    total = best.add_(before).view(num_groups, -1)
    scores, places = total.topk(min(count, total.shape[-1]), dim=-1)
    tokens = tokens.view(total.shape).gather(1, places)
    return torch.stack((places, tokens, scores.double().view(torch.int64))), scores


class Best:
    """The best continuations of `num_groups` groups that are alike, best first; `found` as `rank` made it, maybe with
    more groups.

    They are the place among the `width` best ones of each row, row after row; the token; and the bits of the score
    in float64. One tensor, since every read waits for the device.
    """

    def __init__(self, num_groups: int, found: Tensor, width: int, told: Callable[[list[float]], None]) -> None:
        """`told` hears the scores of those that go on where nothing ends."""
        self._num_groups, self._found, self._width, self._told = num_groups, found, width, told

    def read(self, num_beams: int) -> Iterator[tuple[list[float], list[int], list[int]]]:
        """Scores, beams and tokens of the `num_beams` best ones of each group; waits for the device."""
        self._places, self._tokens, scores = self._found.cpu().numpy()[:, : self._num_groups]
        self._scores = scores.view(np.float64)
        best = self._lists(np.s_[:, :num_beams])
        self._told(list(chain.from_iterable(best[0])))
        return zip(*best, strict=True)

    def all_of(self, group: int) -> tuple[list[float], list[int], list[int]]:
        """The same of all continuations of one group, once the best ones were read."""
        return self._lists(np.s_[group])

    def _lists(self, part: Any) -> Any:
        return self._scores[part].tolist(), (self._places[part] // self._width).tolist(), self._tokens[part].tolist()


class Ranking(Replayed):
    """Ranks groups of `num_beams` rows each.

    Captured, it reads logits from one place. The scores up to here lie in another: each run leaves there those of
    the best continuations, which most often are the ones of the next step, so that the host writes scores only where
    something ended, came or left.
    """

    def __init__(
        self, num_beams: int, counts: Seq[int], max_groups: int, vocab_size: int, device: str, dtype: torch.dtype
    ) -> None:
        """`counts` are the numbers of continuations that requests want, `dtype` is that of logits."""
        self._num_beams, self._vocab_size = num_beams, vocab_size
        self._device, self._dtype = torch.device(device), dtype
        most = max(1, min(max_groups, _MOST_NUMBERS // (num_beams * vocab_size)))
        self.batches, self._counts = powers(1, most), frozenset(counts)
        while len(self.batches) > 2 and len(self.batches) * len(self._counts) > MOST_GRAPHS:
            self.batches = thinned(self.batches)
        super().__init__((size, count) for size in self.batches for count in self._counts)
        self._logits = self._scores = torch.empty(0)
        self._lying: list[float] = []

    def capture_all(self, capture: Callable[[Callable[[], Any]], Captured]) -> Iterator[float]:
        rows = self.batches[-1] * self._num_beams
        self._logits = torch.zeros(rows, self._vocab_size, device=self._device, dtype=self._dtype)
        self._scores = torch.zeros(rows, 1, device=self._device)
        yield from super().capture_all(capture)

    def launch(self) -> None:
        super().launch()
        self._logits = self._scores = torch.empty(0)

    def replays(self, logits: Tensor, num_groups: int, num_rows: int, count: int) -> bool:
        """Whether there is a graph for these logits of so many groups with so many rows each."""
        if not self._captured or num_rows != self._num_beams or num_groups > self.batches[-1]:
            return False
        # Logits of another dtype would be rounded on their way to where graphs read them.
        return count in self._counts and logits.dtype == self._dtype

    def replay(self, logits: Tensor, before: list[float], num_groups: int, count: int) -> Best:
        """Of rows that `replays` said yes to; to be read before the next one."""
        rows = len(before)
        self._logits[:rows].copy_(logits)
        if before != self._lying:
            self._scores[:rows].copy_(column_on_host(before, self._device), non_blocking=True)
        self._lying = []  # until somebody has read what the run leaves there
        found = self.run(holding(self.batches, num_groups), count)
        return Best(num_groups, found, min(count, self._vocab_size), self._leave)

    def work(self, *shape: int) -> Tensor:
        num_groups, count = shape
        rows = num_groups * self._num_beams
        before = self._scores[:rows]
        found, scores = rank(rated(self._logits[:rows]), before, num_groups, count)
        before.view(num_groups, -1).copy_(scores[:, : self._num_beams])
        return found

    def _leave(self, scores: list[float]) -> None:
        self._lying = scores


def column_on_host(values: Seq[float], device: torch.device) -> Tensor:
    """fp32 `[n, 1]`, ready to be copied to the device without waiting."""
    host = torch.empty(len(values), 1, dtype=torch.float32, pin_memory=device.type == "cuda")
    host.numpy()[:, 0] = values
    return host
