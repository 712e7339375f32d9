"""Request-level batching: a batch starts together, and the next one begins when all of it has ended."""

from __future__ import annotations

from collections import OrderedDict

from infermix.roles.kv_space import KVSpace
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.admission import give_back, longest_context, promise_prefix, refuse_oversized, start_cached

#: Steps for which a batch of decodes stays as it is: nobody joins, and its KV is there.
UNTIL_AN_END = 1 << 30


class RequestBatchScheduler:
    """KV for the longest possible output is reserved when a batch starts, so nothing is ever preempted.

    A batch is smaller than `batch_size` when the space does not hold that many worst cases. With `max_wait_s` a batch
    that is not full starts once its first request has waited that long (dynamic batching); without, it starts at
    once. Requests are served in order of arrival.
    """

    def __init__(self, batch_size: int, max_wait_s: float = 0.0) -> None:
        self._batch_size, self._max_wait_s = batch_size, max_wait_s
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._seen_s: OrderedDict[int, float] = OrderedDict()
        self._arrived: list[int] = []
        self._running: dict[int, Sequence] = {}
        #: The entry of a running sequence in every step that gives it one token.
        self._singles: dict[int, Scheduled] = {}

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence.seq_id] = sequence
        self._arrived.append(sequence.seq_id)

    def finish(self, sequence: Sequence) -> None:
        self._running.pop(sequence.seq_id, None)
        self._singles.pop(sequence.seq_id, None)
        self._waiting.pop(sequence.seq_id, None)
        self._seen_s.pop(sequence.seq_id, None)

    def schedule(self, space: KVSpace, now_s: float) -> Plan:
        """Raises `UserError` for a request that even an empty space does not hold."""
        self._stamp(now_s)
        if not self._running and self._waiting:
            wake_s = self._start_at_s(now_s)
            if wake_s > now_s:
                return Plan(wake_s=wake_s)
            self._start_batch(space)
        return self._continue(space)

    def _continue(self, space: KVSpace) -> Plan:
        """The inner loop of a busy engine."""
        entries, singles, reserve, tokens = [], self._singles, space.reserve, 0
        for seq_id, seq in self._running.items():
            known = len(seq.tokens) + seq.num_inflight
            new = known - seq.num_computed
            if not new or known >= seq.max_tokens or seq.finish_reason is not None:
                continue
            # What a decoder cut away with its rejected drafts is still there: nobody joins a running batch.
            held = reserve(seq_id, seq.max_tokens - 1)
            assert held, f"the KV of {seq.request.request_id!r} was given to another sequence"
            entries.append(singles[seq_id] if new == 1 else Scheduled(seq, new))
            tokens += new
        stays = tokens == len(self._running) == len(entries) and not space.recompute
        return Plan(entries, valid_steps=UNTIL_AN_END if stays else 1)

    def _stamp(self, now_s: float) -> None:
        for seq_id in self._arrived:
            if seq_id in self._waiting:
                self._seen_s[seq_id] = now_s
        self._arrived.clear()

    def _start_at_s(self, now_s: float) -> float:
        """When the next batch starts if nothing more arrives."""
        if len(self._waiting) >= self._batch_size or not self._max_wait_s:
            return now_s
        return next(iter(self._seen_s.values())) + self._max_wait_s

    def _start_batch(self, space: KVSpace) -> None:
        while self._waiting and len(self._running) < self._batch_size:
            seq = next(iter(self._waiting.values()))
            refuse_oversized(seq, space, self.finish)
            start_cached(seq, space)
            if not space.reserve(seq.seq_id, longest_context(seq)):
                give_back(seq, space)
                break
            promise_prefix(seq, seq.num_uncomputed, space)
            del self._waiting[seq.seq_id], self._seen_s[seq.seq_id]
            self._running[seq.seq_id] = seq
            self._singles[seq.seq_id] = Scheduled(seq, 1)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)
