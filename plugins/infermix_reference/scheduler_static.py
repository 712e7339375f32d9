"""Static batching: a batch starts together, and the next one begins when all of it has ended."""

from __future__ import annotations

from collections import OrderedDict

from infermix.roles.kv_space import KVSpace
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.admission import give_back, longest_context, refuse_oversized, start_cached


class StaticScheduler:
    """KV for the longest possible output is reserved when a batch starts, so nothing is ever preempted.

    A batch is smaller than `batch_size` when the space does not hold that many worst cases.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence.seq_id] = sequence

    def finish(self, sequence: Sequence) -> None:
        self._running.pop(sequence.seq_id, None)
        self._waiting.pop(sequence.seq_id, None)

    def schedule(self, space: KVSpace, now_s: float) -> Plan:
        """Raises `UserError` for a request that even an empty space does not hold."""
        if not self._running:
            self._start_batch(space)
        ready = [seq for seq in self._running.values() if not seq.exhausted and seq.num_uncomputed]
        for seq in ready:
            # What a decoder cut away with its rejected drafts is still there: nobody joins a running batch.
            held = space.reserve(seq.seq_id, longest_context(seq))
            assert held, f"the KV of {seq.request.request_id!r} was given to another sequence"
        return Plan([Scheduled(seq, seq.num_uncomputed) for seq in ready])

    def _start_batch(self, space: KVSpace) -> None:
        while self._waiting and len(self._running) < self._batch_size:
            seq = next(iter(self._waiting.values()))
            refuse_oversized(seq, space, self._waiting)
            start_cached(seq, space)
            if not space.reserve(seq.seq_id, longest_context(seq)):
                give_back(seq, space)
                break
            self._running[seq.seq_id] = self._waiting.pop(seq.seq_id)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)
