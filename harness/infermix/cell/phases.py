"""Names and durations of what a cell does outside its measured repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infermix.measure.clock import now_ns

ReportProgress = Callable[[str, float], None]


class Phases:
    """Times named phases in seconds; entering one is reported as progress."""

    def __init__(self, report: ReportProgress) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.report(name, 0.0)
        started = now_ns()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + (now_ns() - started) / 1e9
