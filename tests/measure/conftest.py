"""A virtual clock, and an engine that lives on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from infermix.errors import UserError
from infermix.roles.engine import EngineReport
from infermix.roles.request import FinishReason, Request, TokenEvent

NS = 1_000_000_000


@dataclass
class VirtualClock:
    """Time passes only when somebody says so. `drag_s` is lost by every sleep."""

    time_ns: int = 5 * NS
    drag_s: float = 0.0
    slept_s: float = 0.0

    def now_ns(self) -> int:
        return self.time_ns

    def advance(self, seconds: float) -> None:
        self.time_ns += round(seconds * NS)

    def sleep_until(self, time_ns: int) -> None:
        assert time_ns > self.time_ns, "a sleep into the past"
        self.slept_s += (time_ns - self.time_ns) / NS
        self.time_ns = time_ns + round(self.drag_s * NS)


@dataclass
class FakeEngine:
    """Batches up to `max_num_seqs` requests; every step takes `step_s` and gives each of them `burst` tokens.

    The first `silent_steps` steps of a request give nothing. Requests in `refused` raise at `submit`, those in
    `broken` end with an error after one token.
    """

    clock: VirtualClock
    step_s: float = 0.01
    submit_s: float = 0.0
    max_num_seqs: int = 8
    burst: int = 1
    silent_steps: int = 0
    refused: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()
    step_times: dict[int, float] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    running: dict[str, tuple[Request, int, int]] = field(default_factory=dict)
    steps: int = 0
    most_running: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    tokenizer: None = None

    def submit(self, request: Request) -> None:
        self.clock.advance(self.submit_s)
        if request.request_id in self.refused:
            raise UserError("the prompt is longer than the model's positions")
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[TokenEvent]:
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.pop(0)
            self.running[request.request_id] = (request, 0, self.silent_steps)
        self.most_running = max(self.most_running, len(self.running))
        self.clock.advance(self.step_times.get(self.steps, self.step_s))
        self.steps += 1
        events = [self._advance(name) for name in list(self.running)]
        return [event for event in events if event is not None]

    def _advance(self, name: str) -> TokenEvent | None:
        request, done, silent = self.running[name]
        if silent:
            self.running[name] = (request, done, silent - 1)
            return None
        tokens = range(done, min(done + self.burst, request.sampling.max_new_tokens))
        done = tokens.stop
        reason = FinishReason.LENGTH if done >= request.sampling.max_new_tokens else None
        if name in self.broken:
            reason = FinishReason.ERROR
        self.running[name] = (request, done, 0)
        if reason:
            del self.running[name]
        return TokenEvent(name, tuple(tokens), self.clock.now_ns(), reason)

    def score(self, requests: object) -> list[object]:
        return []

    def report(self) -> EngineReport:
        return EngineReport(counters=dict(self.counters))

    def reset(self) -> None:
        self.waiting.clear()
        self.running.clear()

    def close(self) -> None:
        self.reset()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def make_engine(clock: VirtualClock) -> Callable[..., FakeEngine]:
    """Builds an engine on the test's virtual clock."""
    return lambda **options: FakeEngine(clock, **options)
