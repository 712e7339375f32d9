"""Fair share of tokens between tenants."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping

from infermix.roles.kv_space import KVSpace
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan
from infermix.toolkit.iteration import IterationScheduler
from infermix.toolkit.waiting import Rank


def tenant_of(sequence: Sequence) -> str:
    return sequence.request.tenant or sequence.request.category


class FairQueue:
    """The tenant that was served least goes first, its own requests in order of arrival.

    Virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): every tenant has a
    counter of what it was served, divided by its weight. One that comes back from idleness is lifted to the smallest
    counter of those that wait, so that idleness earns no credit. Counters only grow, so a heap with stale entries
    finds the smallest.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._waiting: dict[str, OrderedDict[int, Sequence]] = {}
        self._served: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._orders: dict[str, int] = {}
        self._virtual_time = 0.0
        self._len = self._pushes = self._admitted = 0

    def push(self, sequence: Sequence, now_s: float) -> None:
        tenant = tenant_of(sequence)
        if tenant not in self._waiting:
            floor = self._smallest()
            self._waiting[tenant] = OrderedDict()
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._virtual_time if floor is None else floor)
            self._pushes += 1
            self._orders[tenant] = self._pushes
            heapq.heappush(self._heap, (self._served[tenant], self._pushes, tenant))
        self._waiting[tenant][sequence.seq_id] = sequence
        self._len += 1

    def charge(self, tenant: str, tokens: float) -> None:
        """A tenant was served `tokens` more."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1.0)

    def head(self, now_s: float) -> Sequence | None:
        if self._smallest() is None:
            return None
        return next(iter(self._waiting[self._heap[0][2]].values()))

    def pop(self) -> tuple[Rank, Sequence]:
        counter, _, tenant = self._heap[0]
        queue = self._waiting[tenant]
        _, sequence = queue.popitem(last=False)
        self._len -= 1
        self._virtual_time = max(self._virtual_time, counter)
        self._admitted += 1
        if not queue:
            del self._waiting[tenant]
        return (0.0, self._admitted), sequence

    def discard(self, sequence: Sequence) -> None:
        tenant = tenant_of(sequence)
        queue = self._waiting.get(tenant, OrderedDict())
        if queue.pop(sequence.seq_id, None) is not None:
            self._len -= 1
            if not queue:
                del self._waiting[tenant]

    def __len__(self) -> int:
        return self._len

    def _smallest(self) -> float | None:
        """Brings the tenant that was served least to the top of the heap; `None` when nobody waits."""
        while self._heap:
            counter, order, tenant = self._heap[0]
            if tenant not in self._waiting or self._orders[tenant] != order:
                heapq.heappop(self._heap)  # nobody of it waits any more, or it was away in between
            elif counter < self._served[tenant]:
                heapq.heapreplace(self._heap, (self._served[tenant], order, tenant))
            else:
                return counter
        return None


class FairShareScheduler(IterationScheduler):
    """Charges a prompt when it is let in and outputs as they are produced; preempted work is not charged again.

    Bound: while two tenants of equal weight both wait, what they were served differs by at most one largest prompt
    plus what `max_num_seqs` running requests still produce. The request admitted last is preempted first.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, chunked: bool, *, swap: bool, watermark: float,
                 weights: Mapping[str, float], output_weight: float) -> None:  # fmt: skip
        self._queue, self._output_weight = FairQueue(weights), output_weight
        self._charged: dict[int, int] = {}
        super().__init__(
            max_num_seqs, max_num_batched_tokens, chunked, swap=swap, waiting=self._queue, watermark=watermark
        )

    def _take(self, seq: Sequence) -> None:
        if seq.seq_id not in self._ranks:
            self._queue.charge(tenant_of(seq), seq.num_prompt_tokens)
            self._charged[seq.seq_id] = seq.num_prompt_tokens
        super()._take(seq)

    def finish(self, sequence: Sequence) -> None:
        charged = self._charged.pop(sequence.seq_id, None)
        if charged is not None:
            self._queue.charge(tenant_of(sequence), self._output_weight * (sequence.num_tokens - charged))
        super().finish(sequence)

    def schedule(self, space: KVSpace, now_s: float) -> Plan:
        self._charge_outputs()
        return super().schedule(space, now_s)

    def _charge_outputs(self) -> None:
        """What was produced since the last step that was asked for."""
        given: dict[str, int] = {}
        for seq_id, entry in self._running.items():
            seq = entry.sequence
            known = len(seq.tokens) + seq.num_inflight
            before, self._charged[seq_id] = self._charged[seq_id], known
            tenant = seq.request.tenant or seq.request.category
            given[tenant] = given.get(tenant, 0) + known - before
        for tenant, count in given.items():
            self._queue.charge(tenant, self._output_weight * count)

    def _waits_for_an_end(self) -> bool:
        return False  # who is next in line changes with what the others are given
