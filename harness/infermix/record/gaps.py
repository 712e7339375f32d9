"""Times between tokens as a histogram: what a run keeps that has too many of them to store each."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec

#: Neighbouring bins differ by this factor, so a percentile is at most half a percent off.
RATIO = 1.01
#: The lower edge of bin 0, in seconds; what is shorter falls into it.
FIRST_S = 1e-6
_LOG_RATIO = math.log(RATIO)


class GapCounter:
    """Counts gaps while a run goes on."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total_s = 0.0

    def add(self, gap_s: float, count: int = 1) -> None:
        if count:
            place = bin_of(gap_s)
            self._counts[place] = self._counts.get(place, 0) + count
            self._total_s += gap_s * count

    def histogram(self) -> GapHistogram:
        return GapHistogram(sorted(self._counts.items()), self._total_s)


class GapHistogram(msgspec.Struct):
    """`bins` are (b, count) in order: so many gaps in `[FIRST_S RATIO^b, FIRST_S RATIO^(b + 1))` seconds.

    `total_s` is their exact sum.
    """

    bins: list[tuple[int, int]] = []
    total_s: float = 0.0

    @property
    def num_gaps(self) -> int:
        return sum(count for _, count in self.bins)

    @property
    def mean_s(self) -> float:
        """Raises `ZeroDivisionError` without a gap."""
        return self.total_s / self.num_gaps

    def percentiles(self, wanted: Sequence[float]) -> list[float]:
        """Percentiles (0 to 100) as numpy's, linear between ranks, each gap in the geometric middle of its bin."""
        edges, last = list(accumulate(count for _, count in self.bins)), self.num_gaps - 1

        def at(rank: int) -> float:
            return FIRST_S * RATIO ** (self.bins[bisect_right(edges, min(rank, last))][0] + 0.5)

        found = []
        for percent in wanted:
            rank = int(percent / 100 * last)
            found.append(at(rank) + (percent / 100 * last - rank) * (at(rank + 1) - at(rank)))
        return found


def bin_of(gap_s: float) -> int:
    return max(0, int(math.log(gap_s / FIRST_S) / _LOG_RATIO)) if gap_s > FIRST_S else 0
