"""The one clock. No other file of the package reads the time.

Stamps are `time.perf_counter_ns`: monotonic, not comparable between machines or reboots.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What a measurement reads; tests hand over a virtual one."""

    def now_ns(self) -> int: ...

    def sleep_until(self, time_ns: int) -> None:
        """Return at `time_ns` or as soon after it as the machine allows."""
        ...


def now_ns() -> int:
    return time.perf_counter_ns()


def sleep_until(time_ns: int) -> None:
    """Sleep until the clock shows `time_ns`; returns at once when that is past."""
    while (left := time_ns - now_ns()) > 0:
        time.sleep(left / 1e9)


def utc_stamp() -> str:
    """The date for `created` fields, in whole seconds, e.g. `2026-01-31T23:59:59Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class SystemClock:
    """The real clock as an object."""

    def now_ns(self) -> int:
        return now_ns()

    def sleep_until(self, time_ns: int) -> None:
        sleep_until(time_ns)
