"""Which of several replicas gets a request. Pure policies, no torch: the same ones drive engines and simulations."""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from infermix.errors import UserError
from infermix.roles.request import Request

#: Tokens of a prompt that prefix affinity looks up at once, and most such pieces that it remembers.
PIECE_TOKENS, MOST_PIECES = 64, 1 << 20


class Router(Protocol):
    """Told of every request that ends, so that it knows how many each replica has."""

    def choose(self, request: Request) -> int:
        """The replica of a new request, which counts for it until `finished`."""
        ...

    def finished(self, replica: int) -> None: ...

    def reset(self) -> None:
        """Forget everything: nothing runs, and caches are empty."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas, self._next = num_replicas, 0

    def choose(self, request: Request) -> int:
        chosen, self._next = self._next, (self._next + 1) % self._num_replicas
        return chosen

    def finished(self, replica: int) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        self._next = 0


class LeastLoaded:
    """The replica with the fewest requests in flight, of equal ones the one that was chosen longest ago.

    A heap with stale entries finds it in O(log M) on average, so that a thousand replicas cost no more than ten.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self.reset()

    def reset(self) -> None:
        self.loads = [0] * self._num_replicas
        self._stamps = list(range(self._num_replicas))
        self._count = self._num_replicas
        self._heap = [(0, stamp, replica) for replica, stamp in enumerate(self._stamps)]

    def choose(self, request: Request) -> int:
        chosen = self.least()
        self.take(chosen)
        return chosen

    def least(self) -> int:
        """The one that would be chosen, unchanged."""
        while (top := self._heap[0])[:2] != (self.loads[top[2]], self._stamps[top[2]]):
            heapq.heappop(self._heap)
        return top[2]

    def take(self, replica: int) -> None:
        """One more request for `replica`."""
        self._stamps[replica], self._count = self._count, self._count + 1
        self._change(replica, 1)

    def finished(self, replica: int) -> None:
        self._change(replica, -1)

    def _change(self, replica: int, by: int) -> None:
        self.loads[replica] += by
        heapq.heappush(self._heap, (self.loads[replica], self._stamps[replica], replica))
        if len(self._heap) > 64 + 8 * self._num_replicas:
            self._heap = [(load, self._stamps[each], each) for each, load in enumerate(self.loads)]
            heapq.heapify(self._heap)


class PrefixAffine:
    """To where the longest beginning of its prompt was sent before, unless that replica is too busy.

    Remembers the replica that was last sent each prompt beginning, in pieces of `PIECE_TOKENS` tokens; the oldest are
    forgotten. Balance goes before affinity: a replica with more than `max_imbalance` requests more than the least
    loaded one gets nothing for its memory. Without a match the least loaded one is chosen. (The idea of cache-aware
    routing, as in SGLang, https://lmsys.org/blog/2024-12-04-sglang-v0-4/, over exact beginnings instead of a tree.)
    """

    def __init__(self, num_replicas: int, max_imbalance: int = 16) -> None:
        self._balance, self._max_imbalance = LeastLoaded(num_replicas), max_imbalance
        self._seen: OrderedDict[int, int] = OrderedDict()

    def reset(self) -> None:
        self._balance.reset()
        self._seen.clear()

    def choose(self, request: Request) -> int:
        pieces = _beginnings(request)
        chosen, least = self._last_seen(pieces), self._balance.least()
        if chosen is None or self._balance.loads[chosen] > self._balance.loads[least] + self._max_imbalance:
            chosen = least
        for piece in pieces:
            self._seen[piece] = chosen
            self._seen.move_to_end(piece)
        while len(self._seen) > MOST_PIECES:
            self._seen.popitem(last=False)
        self._balance.take(chosen)
        return chosen

    def finished(self, replica: int) -> None:
        self._balance.finished(replica)

    def _last_seen(self, pieces: list[int]) -> int | None:
        return next((self._seen[piece] for piece in reversed(pieces) if piece in self._seen), None)


def _beginnings(request: Request) -> list[int]:
    """A chained hash for every beginning of whole pieces."""
    tokens = array("q", request.prompt_ids)
    chain, found = hash(request.cache_salt), []
    for start in range(0, len(tokens) - PIECE_TOKENS + 1, PIECE_TOKENS):
        chain = hash((chain, tokens[start : start + PIECE_TOKENS].tobytes()))
        found.append(chain)
    return found


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_affine": PrefixAffine,
}


def make_router(name: str, num_replicas: int) -> Router:
    """Raises `UserError` for an unknown name."""
    if name not in ROUTERS:
        raise UserError(f"there is no router {name!r}", key="engine.router", hint=", ".join(ROUTERS))
    return ROUTERS[name](num_replicas)
