"""Drive an engine through one repeat of a workload and keep the raw samples.

Open loop (`concurrency` is `None`): a request is submitted as soon as its arrival is due, and every latency counts
from that intended arrival, however late the engine let us come back (no coordinated omission). Closed loop: a
request's arrival is the moment at which its turn came, which is the stamp of the event that ended another one.

A request with `after` is the next turn of a session: it arrives `think_s` after the event that ended the other. In a
closed loop `concurrency` counts sessions then, and one that thinks keeps its place.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from infermix.errors import InfermixError, UserError
from infermix.measure.clock import Clock, SystemClock
from infermix.record.record import OutputSample, Repeat, RequestSample
from infermix.roles.engine import Engine
from infermix.roles.request import FinishReason, Request, TokenEvent

#: A step that makes progress without an event computes at least one prompt token, so a silent run longer than the
#: prompt tokens in flight is a stall. The margins allow for recomputation, and for engines whose `step` only polls.
STALL_STEPS = 1_000
STALL_NS = 10_000_000_000


def drive(
    engine: Engine,
    requests: Sequence[Request],
    concurrency: int | None,
    *,
    clock: Clock | None = None,
    keep_outputs: int = 0,
) -> Repeat:
    """Run `requests` to their end. Output token ids are kept for the first `keep_outputs` requests.

    A request that the engine refuses (`UserError`) or ends with an error is recorded as failed. Raises
    `InfermixError` when the engine breaks its contract: it stalls, goes idle with requests unfinished, or reports a
    request that is not running.
    """
    return _Run(engine, requests, concurrency, clock or SystemClock(), keep_outputs).finish()


def _turns_after(requests: Sequence[Request]) -> dict[str, Request]:
    """The next turn by the id of the request that it waits for. Raises `InfermixError` for turns that never come."""
    following = {request.after: request for request in requests if request.after}
    if len(following) != sum(bool(request.after) for request in requests):
        raise InfermixError("two requests follow the same one: a session has one next turn")
    seen = {request.request_id for request in requests if not request.after}
    reached, frontier = set(seen), list(seen)
    while frontier:
        turn = following.get(frontier.pop())
        if turn is not None:
            reached.add(turn.request_id)
            frontier.append(turn.request_id)
    lost = [request.request_id for request in requests if request.request_id not in reached]
    if lost:
        raise InfermixError(f"request {lost[0]!r} follows one that is not there")
    return following


@dataclass(slots=True)
class _EngineTime:
    """Time spent inside calls of the engine, which is not the load generator's fault."""

    ends: list[int] = field(default_factory=lambda: [0])
    totals: list[int] = field(default_factory=lambda: [0])
    durations: list[int] = field(default_factory=lambda: [0])

    def add(self, start_ns: int, end_ns: int) -> None:
        self.ends.append(end_ns)
        self.durations.append(end_ns - start_ns)
        self.totals.append(self.totals[-1] + end_ns - start_ns)

    def since(self, time_ns: int) -> int:
        """Nanoseconds inside the engine from `time_ns` until the last call returned."""
        first = bisect_right(self.ends, time_ns)
        if first == len(self.ends):
            return 0
        begun = self.ends[first] - self.durations[first]
        before = max(0, time_ns - begun)
        return self.totals[-1] - self.totals[first - 1] - before


def _outcome(sample: RequestSample) -> FinishReason:
    """A request fails with any of its outputs; otherwise it ends as its first one did."""
    reasons = [FinishReason(output.finish_reason) for output in sample.outputs]
    failures = [reason for reason in reasons if reason in (FinishReason.ERROR, FinishReason.ABORT)]
    return failures[0] if failures else reasons[0]


class _Run:
    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        concurrency: int | None,
        clock: Clock,
        keep_outputs: int,
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise InfermixError(f"concurrency must be at least 1, not {concurrency}")
        ids = {request.request_id for request in requests}
        if len(ids) != len(requests):
            raise InfermixError("two requests of one repeat have the same request_id")
        first = [request for request in requests if not request.after]
        ordered = first if concurrency else sorted(first, key=lambda each: each.arrival_s)
        self.turns_after = _turns_after(requests)
        self.thinking: list[tuple[int, int, Request]] = []
        self.num_turns = 0
        self.engine, self.concurrency, self.clock = engine, concurrency, clock
        self.expect = getattr(engine, "expect", None)
        self.pending = deque(ordered)
        in_order = [*ordered, *self.turns_after.values()]
        self.kept = {request.request_id for request in in_order[:keep_outputs]}
        self.samples: dict[str, RequestSample] = {}
        self.running: dict[str, Request] = {}
        self.open_outputs: dict[str, int] = {}
        self.turns: deque[int] = deque()
        self.engine_time = _EngineTime()
        self.steps = self.silent_steps = 0
        self.start_ns = self.last_event_ns = self.end_ns = clock.now_ns()

    def finish(self) -> Repeat:
        while self.pending or self.running or self.thinking:
            self._submit_due()
            if self.engine.has_work:
                if self.expect is not None:
                    self.expect(self._next_due_ns())
                self._step()
            elif self.running:
                raise InfermixError(
                    f"the engine is idle, but {len(self.running)} requests have not ended, "
                    f"among them {next(iter(self.running))!r}"
                )
            elif (due_ns := self._next_due_ns()) is not None and due_ns > self.clock.now_ns():
                self.clock.sleep_until(due_ns)
        samples = list(self.samples.values())
        return Repeat(
            wall_s=(self.end_ns - self.start_ns) / 1e9,
            requests=samples,
            steps=self.steps,
            generator_late_s=max((sample.late_s for sample in samples), default=0.0),
        )

    def _arrival_ns(self, request: Request) -> int:
        return self.start_ns + round(request.arrival_s * 1e9)

    def _next_due_ns(self) -> int | None:
        """The next arrival that is known; `None` when only the end of a request brings one."""
        known = [due_ns for due_ns, _, _ in self.thinking[:1]]
        if self.pending and not self.concurrency:
            known.append(self._arrival_ns(self.pending[0]))
        return min(known, default=None)

    def _submit_due(self) -> None:
        while self.thinking and self.thinking[0][0] <= self.clock.now_ns():
            due_ns, _, request = heapq.heappop(self.thinking)
            self._submit(request, due_ns)
        while self.pending:
            if self.concurrency:
                if len(self.running) + len(self.thinking) >= self.concurrency:
                    return
                due_ns = self.turns.popleft() if self.turns else self.start_ns
            else:
                due_ns = self._arrival_ns(self.pending[0])
                if due_ns > self.clock.now_ns():
                    return
            self._submit(self.pending.popleft(), due_ns)

    def _submit(self, request: Request, due_ns: int) -> None:
        sent_ns = self.clock.now_ns()
        late_ns = sent_ns - due_ns - self.engine_time.since(due_ns)
        sample = RequestSample(
            request_id=request.request_id,
            arrival_s=(due_ns - self.start_ns) / 1e9,
            sent_s=(sent_ns - self.start_ns) / 1e9,
            input_tokens=len(request.prompt_ids),
            emissions=[],
            finish_reason="",
            category=request.category,
            tenant=request.tenant,
            late_s=max(0, late_ns) / 1e9,
            more_outputs=[OutputSample() for _ in range(request.sampling.num_outputs - 1)],
        )
        self.samples[request.request_id] = sample
        self.running[request.request_id] = request
        self.open_outputs[request.request_id] = request.sampling.num_outputs
        try:
            self.engine.submit(request)
        except UserError as error:
            sample.error = str(error)
            self._end(sample, FinishReason.ERROR, self.clock.now_ns())
        finally:
            self.engine_time.add(sent_ns, self.clock.now_ns())

    def _step(self) -> None:
        begin_ns = self.clock.now_ns()
        events = self.engine.step()
        now_ns = self.clock.now_ns()
        self.engine_time.add(begin_ns, now_ns)
        self.steps += 1
        for event in events:
            self._receive(event)
        if events:
            self.silent_steps, self.last_event_ns = 0, now_ns
        else:
            self.silent_steps += 1
            self._check_stall(now_ns)

    def _receive(self, event: TokenEvent) -> None:
        if event.request_id not in self.running:
            state = "already ended" if event.request_id in self.samples else "never submitted"
            raise InfermixError(f"the engine reported request {event.request_id!r}, which was {state}")
        sample = self.samples[event.request_id]
        output = sample.outputs[event.output]
        if event.token_ids:
            output.emissions.append(((event.time_ns - self.start_ns) / 1e9, len(event.token_ids)))
            if event.request_id in self.kept:
                output.output_ids.extend(event.token_ids)
        if event.finish_reason is not None:
            output.finish_reason = event.finish_reason.value
            self.open_outputs[event.request_id] -= 1
            if not self.open_outputs[event.request_id]:
                self._end(sample, _outcome(sample), event.time_ns)

    def _end(self, sample: RequestSample, reason: FinishReason, time_ns: int) -> None:
        sample.finish_reason = reason.value
        del self.running[sample.request_id]
        self.end_ns = max(self.end_ns, time_ns)
        following = self.turns_after.pop(sample.request_id, None)
        if following is not None and not sample.error and reason is not FinishReason.ERROR:
            due_ns = time_ns + round(following.think_s * 1e9)
            self.num_turns += 1
            heapq.heappush(self.thinking, (due_ns, self.num_turns, following))
            return
        self._end_session(following, sample.request_id, time_ns)
        if self.concurrency:
            self.turns.append(time_ns)

    def _end_session(self, request: Request | None, failed_id: str, time_ns: int) -> None:
        """The turns behind a failed one cannot be asked; they fail with it."""
        at_s = (time_ns - self.start_ns) / 1e9
        while request is not None:
            self.samples[request.request_id] = RequestSample(
                request_id=request.request_id,
                arrival_s=at_s,
                sent_s=at_s,
                input_tokens=len(request.prompt_ids),
                emissions=[],
                finish_reason=FinishReason.ERROR.value,
                category=request.category,
                tenant=request.tenant,
                error=f"not sent: request {failed_id!r}, an earlier turn of its session, failed",
            )
            request = self.turns_after.pop(request.request_id, None)

    def _check_stall(self, now_ns: int) -> None:
        if self.silent_steps <= STALL_STEPS or now_ns - self.last_event_ns < STALL_NS:
            return
        prompt_tokens = sum(len(request.prompt_ids) for request in self.running.values())
        if self.silent_steps > STALL_STEPS + prompt_tokens:
            raise InfermixError(
                f"the engine made no progress for {self.silent_steps} steps and "
                f"{(now_ns - self.last_event_ns) / 1e9:.0f} s with {len(self.running)} requests in flight"
            )
