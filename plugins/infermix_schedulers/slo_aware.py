"""The largest batch that keeps latency limits, from measured step times."""

from __future__ import annotations

from infermix.roles.kv_space import KVSpace
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan
from infermix.toolkit.iteration import IterationScheduler
from infermix.toolkit.waiting import KeyedQueue, Rank

from infermix_schedulers.step_model import StepModel, measures_of

#: Of so many admissions in a row, one goes to a request whose TTFT limit has passed, if there is any.
LATE_EVERY = 8
#: Prompts get so many tokens a step even where the limit on TPOT is out of reach.
MIN_CHUNK_TOKENS = 16


class DeadlineQueue:
    """In order of arrival, but those that can still meet their TTFT limit before those that no longer can.

    At most `LATE_EVERY - 1` others are let in between two late ones, so nothing starves.
    """

    def __init__(self, ttft_s: float) -> None:
        self._ttft_s = ttft_s
        self._on_time = KeyedQueue(lambda sequence, now_s: now_s + ttft_s)
        self._late = KeyedQueue()
        self._since_late = self._admitted = 0
        self._next = self._on_time

    def push(self, sequence: Sequence, now_s: float) -> None:
        self._on_time.push(sequence, now_s)

    def head(self, now_s: float) -> Sequence | None:
        while (rank := self._on_time.first_rank(now_s)) is not None and rank[0] < now_s:
            self._late.push(self._on_time.pop()[1], now_s)
        late_first = bool(self._late) and (self._since_late >= LATE_EVERY - 1 or not self._on_time)
        self._next = self._late if late_first else self._on_time
        return self._next.head(now_s)

    def pop(self) -> tuple[Rank, Sequence]:
        self._since_late = 0 if self._next is self._late else self._since_late + 1
        self._admitted += 1
        return (0.0, self._admitted), self._next.pop()[1]

    def discard(self, sequence: Sequence) -> None:
        self._on_time.discard(sequence)
        self._late.discard(sequence)

    def __len__(self) -> int:
        return len(self._on_time) + len(self._late)


class SloAwareScheduler(IterationScheduler):
    """Chunked prefill whose batch and chunks grow as far as measured step times allow.

    A running request gets a token per step, so TPOT stays within `tpot_s` where every step does: one more request
    joins only while a step with a smallest chunk beside the decodes would stay below the limit, and prompts get the
    tokens that then still fit. Both are predicted so that the share `quantile` of steps stays below. TTFT is kept by
    order: see `DeadlineQueue`; where both limits cannot be kept, TPOT is. Until enough steps were measured (and with
    an engine that measures none) it is plain chunked prefill. At least one request always runs, and a started prompt
    gets at least `MIN_CHUNK_TOKENS` a step, even where the limit is out of reach. The one admitted last is preempted
    first.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        swap: bool,
        watermark: float,
        ttft_s: float,
        tpot_s: float,
        quantile: float,
    ) -> None:
        self._tpot_s, self._model = tpot_s, StepModel(quantile)
        self._context_tokens = 0
        super().__init__(
            max_num_seqs, max_num_batched_tokens, True, swap=swap, waiting=DeadlineQueue(ttft_s), watermark=watermark
        )

    def observe(self, step_s: float, plan: Plan) -> None:
        self._model.observe(step_s, *measures_of(plan))

    def schedule(self, space: KVSpace, now_s: float) -> Plan:
        self._context_tokens = sum(entry.sequence.num_computed for entry in self._running.values())
        return super().schedule(space, now_s)

    def _stays(self) -> bool:
        return not self.num_waiting  # limits and deadlines move with time

    def _step_budget(self) -> int:
        running = len(self._running)
        tokens = self._model.tokens_within(self._tpot_s, running, self._context_tokens)
        if tokens is None:
            return self._max_num_batched_tokens
        # Decodes are never cut: a step that is too long already gets shorter by letting nobody in.
        return min(self._max_num_batched_tokens, max(tokens, running + MIN_CHUNK_TOKENS))

    def _may_admit(self, num_running: int) -> bool:
        if not num_running or num_running >= self._max_num_seqs:
            return not num_running
        after = num_running + 1
        context = self._context_tokens * after // max(1, num_running)
        step_s = self._model.predict(after, after + MIN_CHUNK_TOKENS, context)
        return step_s is None or step_s <= self._tpot_s
