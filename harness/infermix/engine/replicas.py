"""Several native engines on one device: the same weights, each with KV, scheduler and decoder of its own."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from infermix.errors import UserError

if TYPE_CHECKING:
    from infermix.engine.native import NativeEngine
    from infermix.roles.engine import EngineReport, Score, ScoreRequest
    from infermix.roles.request import Request, TokenEvent
    from infermix.toolkit.routing import Router

#: Counters of which the largest counts, not the sum.
_MOST = ("kv_fragmentation_max",)


class Replicas:
    """An `Engine` of engines that take turns: a step of it is one of everybody who has work.

    `attach[i]` makes the shared model write and read the KV of engine i; it is called before that engine's step.
    """

    def __init__(
        self, engines: Seq[NativeEngine], attach: Seq[Callable[[], None]], router: Router, report: EngineReport
    ) -> None:
        self.tokenizer = engines[0].tokenizer
        self._engines, self._attach, self._router, self._report = engines, attach, router, report
        #: Replica and outputs that have not ended, of every request.
        self._open: dict[str, list[int]] = {}

    def submit(self, request: Request) -> None:
        chosen = self._router.choose(request)
        try:
            self._engines[chosen].submit(request)
        except UserError:
            self._router.finished(chosen)
            raise
        self._open[request.request_id] = [chosen, request.sampling.num_outputs]

    @property
    def has_work(self) -> bool:
        return any(engine.has_work for engine in self._engines)

    def step(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for engine, attach in zip(self._engines, self._attach, strict=True):
            if engine.has_work:
                attach()
                events += engine.step()
        for event in events:
            if event.finish_reason is not None:
                self._note_end(event.request_id)
        return events

    def _note_end(self, request_id: str) -> None:
        entry = self._open[request_id]
        entry[1] -= 1
        if not entry[1]:
            self._router.finished(entry[0])
            del self._open[request_id]

    def score(self, requests: Seq[ScoreRequest]) -> list[Score]:
        self._attach[0]()
        return self._engines[0].score(requests)

    def report(self) -> EngineReport:
        counters: dict[str, float] = {}
        for engine in self._engines:
            for name, value in engine.report().counters.items():
                counters[name] = (
                    max(counters.get(name, 0.0), value) if name in _MOST else counters.get(name, 0) + value
                )
        self._report.counters = counters
        return self._report

    def reset(self) -> None:
        for engine in self._engines:
            engine.reset()
        self._router.reset()
        self._open.clear()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
