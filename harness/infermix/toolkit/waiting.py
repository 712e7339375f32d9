"""Queues of requests that have not been admitted yet: the order is what makes one scheduling policy of another."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from infermix.roles.request import Sequence

#: Fixed position of a sequence in a policy's total order, smaller first; no two are equal.
Rank = tuple[float, int]
#: Sort key of a sequence, and the time at which it was queued (seconds of the engine's clock).
Key = Callable[[Sequence, float], float]


class WaitingQueue(Protocol):
    """`head` and `pop` cost at most O(log n) on average, so that a step does not pay for what waits."""

    def push(self, sequence: Sequence, now_s: float) -> None: ...

    def head(self, now_s: float) -> Sequence | None:
        """Who is next; `None` when nobody may be admitted now."""
        ...

    def pop(self) -> tuple[Rank, Sequence]:
        """Take what `head` returned last, with the rank that it keeps until it ends."""
        ...

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence; unknown ones are ignored."""
        ...

    def __len__(self) -> int: ...


def in_order_of_arrival(sequence: Sequence, now_s: float) -> float:
    return 0.0


class KeyedQueue:
    """The smallest key first, equal ones in order of arrival.

    Keys are fixed when a sequence is queued. Ageing needs no more: a key of "time of arrival + handicap" lets every
    request gain on later ones as it waits, and a request is overtaken only by those that arrive within the
    difference of the handicaps after it.
    """

    def __init__(self, key: Key = in_order_of_arrival) -> None:
        self._key = key
        self._heap: list[tuple[float, int, Sequence]] = []
        self._live: set[int] = set()
        self._count = 0

    def push(self, sequence: Sequence, now_s: float) -> None:
        heapq.heappush(self._heap, (self._key(sequence, now_s), self._count, sequence))
        self._live.add(sequence.seq_id)
        self._count += 1

    def head(self, now_s: float) -> Sequence | None:
        while self._heap and self._heap[0][2].seq_id not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def first_rank(self, now_s: float) -> Rank | None:
        """Rank of the head, for queues made of several."""
        return None if self.head(now_s) is None else self._heap[0][:2]

    def pop(self) -> tuple[Rank, Sequence]:
        key, count, sequence = heapq.heappop(self._heap)
        self._live.remove(sequence.seq_id)
        return (key, count), sequence

    def discard(self, sequence: Sequence) -> None:
        self._live.discard(sequence.seq_id)

    def __len__(self) -> int:
        return len(self._live)
