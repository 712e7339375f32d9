"""`engine: simulated`: M replicas behind a router, on a virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from infermix.errors import InfermixError, Unsupported, UserError
from infermix.record.gaps import GapCounter, GapHistogram

if TYPE_CHECKING:
    from collections.abc import Callable

    from infermix.engine.simulated.replica import Replica
    from infermix.engine.simulated.step_clock import StepClock
    from infermix.engine.simulated.virtual_clock import VirtualClock
    from infermix.roles.engine import EngineReport, Score, ScoreRequest
    from infermix.roles.request import Request, TokenEvent
    from infermix.toolkit.routing import Router


class SimulatedEngine:
    """An `Engine` that computes nothing: what it returns is when tokens would have come.

    `step` moves `clock` to the next event and returns its tokens; never past what `expect` was told. Sampling is not
    simulated: every request gives `max_new_tokens` tokens, and all of them are token 0.
    """

    tokenizer = None

    def __init__(
        self,
        *,
        report: EngineReport,
        make_replicas: Callable[[GapCounter], list[Replica]],
        router: Router,
        clock: VirtualClock,
        step_clock: StepClock,
        max_model_len: int,
    ) -> None:
        self.clock, self._report, self._make = clock, report, make_replicas
        self._router, self._step_clock, self._max_model_len = router, step_clock, max_model_len
        self._horizon_ns: int | None = None
        self.reset()

    def submit(self, request: Request) -> None:
        """Raises `UserError` for an empty prompt and for what no replica holds."""
        total = len(request.prompt_ids) + request.sampling.max_new_tokens
        if not request.prompt_ids:
            raise UserError(f"request {request.request_id!r} has an empty prompt")
        if total > self._max_model_len:
            raise UserError(
                f"request {request.request_id!r} needs {total} tokens, the engine holds {self._max_model_len}",
                hint="shorten the prompt, lower max_new_tokens, or raise limits.max_model_len",
            )
        if request.sampling.num_outputs > 1:
            raise UserError(f"request {request.request_id!r} wants several outputs, which are not simulated")
        chosen = self._router.choose(request)
        self._owners[request.request_id] = chosen
        self._replicas[chosen].add(request, self.clock.now_ns())
        self._touch(chosen)

    def expect(self, time_ns: int | None) -> None:
        """Nothing arrives before that moment (`None`: before the end of a request), so time may pass until then."""
        self._horizon_ns = time_ns

    @property
    def has_work(self) -> bool:
        return bool(self._owners)

    def step(self) -> list[TokenEvent]:
        while (found := self._next()) is not None:
            time_ns, chosen = found
            if self._horizon_ns is not None and self.clock.now_ns() < self._horizon_ns <= time_ns:
                self.clock.sleep_until(self._horizon_ns)
                return []
            heapq.heappop(self._heap)
            self.clock.sleep_until(time_ns)
            events = self._advance(chosen, time_ns)
            if events:
                return events
        if self._owners:
            raise InfermixError(f"{len(self._owners)} requests wait, and no replica does anything")
        return []

    def score(self, requests: Seq[ScoreRequest]) -> list[Score]:
        raise Unsupported("a simulated engine has no logits")

    def gaps(self) -> GapHistogram:
        """Times between tokens since the last reset, which the events do not tell."""
        return self._gaps.histogram()

    def report(self) -> EngineReport:
        counters: dict[str, float] = dict(self._step_clock.counters())
        for replica in self._replicas:
            for name, value in replica.counters().items():
                counters[name] = counters.get(name, 0.0) + value
        self._report.counters = counters
        return self._report

    def reset(self) -> None:
        self._gaps = GapCounter()
        self._replicas = self._make(self._gaps)
        self._router.reset()
        self._step_clock.reset()
        self._owners: dict[str, int] = {}
        #: When a replica has something to do; entries that no longer hold are skipped.
        self._heap: list[tuple[int, int]] = []
        self._due: list[int | None] = [None] * len(self._replicas)

    def close(self) -> None:
        self._replicas.clear()

    def _touch(self, index: int) -> None:
        """Note when a replica is due next: at once when it has to be started."""
        replica = self._replicas[index]
        due = replica.next_ns
        if due is None and replica.has_work:
            due = self.clock.now_ns()
        if due != self._due[index]:
            self._due[index] = due
            if due is not None:
                heapq.heappush(self._heap, (due, index))

    def _next(self) -> tuple[int, int] | None:
        while self._heap and self._due[self._heap[0][1]] != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def _advance(self, index: int, time_ns: int) -> list[TokenEvent]:
        replica = self._replicas[index]
        self._due[index] = None
        events = replica.finish() if replica.is_running else []
        for event in events:
            if event.finish_reason is not None:
                self._router.finished(self._owners.pop(event.request_id))
        # What the tokens bring (a closed loop, the next turn of a session) is there before the replica looks again.
        if not events and replica.has_work:
            replica.start(time_ns)
        self._touch(index)
        return events
