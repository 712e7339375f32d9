"""Shortest prompt first, with the worst case of KV reserved at admission, so that nothing is ever preempted."""

from __future__ import annotations

import heapq

from infermix.errors import UserError
from infermix.roles.kv_space import KVSpace
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.admission import give_back, start_cached


class ShortestPromptScheduler:
    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._running: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.num_tokens, sequence.seq_id, sequence))

    def finish(self, sequence: Sequence) -> None:
        self._running.pop(sequence.seq_id, None)
        self._waiting = [entry for entry in self._waiting if entry[1] != sequence.seq_id]

    def schedule(self, space: KVSpace, now_s: float) -> Plan:
        while self._waiting and len(self._running) < self._max_num_seqs and self._admit(space):
            pass
        ready = [seq for seq in self._running.values() if seq.num_uncomputed and not seq.exhausted]
        return Plan([Scheduled(seq, seq.num_uncomputed) for seq in ready])

    def _admit(self, space: KVSpace) -> bool:
        sequence = self._waiting[0][2]
        longest = sequence.num_prompt_tokens + sequence.request.sampling.max_new_tokens
        if not space.fits(longest):
            heapq.heappop(self._waiting)
            raise UserError(
                f"request {sequence.request.request_id!r} needs {longest} tokens of KV, more than there are"
            )
        start_cached(sequence, space)
        if not space.reserve(sequence.seq_id, longest):
            give_back(sequence, space)
            return False
        self._running[sequence.seq_id] = heapq.heappop(self._waiting)[2]
        return True

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)
