"""A clock that only moves when it is told to."""

from __future__ import annotations


class VirtualClock:
    """`measure.clock.Clock` without time: sleeping until a moment makes it that moment."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        return self._now_ns

    def sleep_until(self, time_ns: int) -> None:
        self._now_ns = max(self._now_ns, time_ns)
