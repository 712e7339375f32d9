"""How long steps take, told to schedulers that want to know."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infermix.engine.step_log import StepLog
    from infermix.roles.scheduler import Plan, Scheduler


class StepTimes:
    """From the later of a step's launch and the end of the step before, until its tokens were read.

    Costs nothing where the scheduler does not `observe`. With a `log` it keeps every step there as well.
    """

    def __init__(self, scheduler: Scheduler, clock_ns: Callable[[], int], log: StepLog | None = None) -> None:
        self._log = log
        self._observe = getattr(scheduler, "observe", None)
        self._clock_ns = clock_ns
        self._launched: deque[tuple[Plan, int]] = deque()
        self._last_end_ns = 0

    @property
    def rows(self) -> list[tuple[int, int, int, int, float]] | None:
        """Of the log, `None` without one."""
        return None if self._log is None else self._log.rows

    def begin(self) -> None:
        """A step begins."""
        if self._log is not None:
            self._log.begin()

    def idle(self) -> None:
        """Nothing is left to do, or nothing may be done yet."""
        if self._log is not None:
            self._log.idle()

    def launched(self, plan: Plan) -> None:
        if self._log is not None:
            self._log.launched(plan)
        if self._observe is not None:
            self._launched.append((plan, self._clock_ns()))

    def collected(self) -> None:
        """The oldest launched step's tokens are on the host."""
        if self._log is not None:
            self._log.collected()
        if self._observe is None:
            return
        plan, launch_ns = self._launched.popleft()
        now_ns = self._clock_ns()
        self._observe((now_ns - max(launch_ns, self._last_end_ns)) / 1e9, plan)
        self._last_end_ns = now_ns

    def reset(self) -> None:
        """Forget steps that were launched and never reported."""
        if self._log is not None:
            self._log.reset()
        self._launched.clear()
