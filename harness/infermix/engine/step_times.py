"""How long steps take, told to schedulers that want to know."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infermix.roles.scheduler import Plan, Scheduler


class StepTimes:
    """From the later of a step's launch and the end of the step before, until its tokens were read.

    Costs nothing where the scheduler does not `observe`.
    """

    def __init__(self, scheduler: Scheduler, clock_ns: Callable[[], int]) -> None:
        self._observe = getattr(scheduler, "observe", None)
        self._clock_ns = clock_ns
        self._launched: deque[tuple[Plan, int]] = deque()
        self._last_end_ns = 0

    def launched(self, plan: Plan) -> None:
        if self._observe is not None:
            self._launched.append((plan, self._clock_ns()))

    def collected(self) -> None:
        """The oldest launched step's tokens are on the host."""
        if self._observe is None:
            return
        plan, launch_ns = self._launched.popleft()
        now_ns = self._clock_ns()
        self._observe((now_ns - max(launch_ns, self._last_end_ns)) / 1e9, plan)
        self._last_end_ns = now_ns

    def reset(self) -> None:
        """Forget steps that were launched and never reported."""
        self._launched.clear()
