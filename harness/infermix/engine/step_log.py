"""What every step computed and how long it took, for a model of step times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from infermix.cost.flops import attended_pairs
from infermix.cost.step_model import StepWork

if TYPE_CHECKING:
    from infermix.roles.scheduler import Plan


class StepLog:
    """Seconds from the moment at which a step's predecessor was read, or the engine had work again, until it is read.

    So everything that a running engine does between two steps counts: scheduling, sampling, submitting.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._launched: deque[StepWork] = deque()
        self._since_ns: int | None = None
        self.rows: list[tuple[int, int, int, int, float]] = []

    def begin(self) -> None:
        """A step begins; of consecutive ones the first counts from here."""
        if self._since_ns is None:
            self._since_ns = self._clock_ns()

    def launched(self, plan: Plan) -> None:
        """Before its tokens count as computed."""
        context = tokens = pairs = 0
        for entry in plan.entries:
            new = entry.num_new_tokens
            tokens += new
            context += entry.sequence.num_computed + new
            pairs += attended_pairs(new, entry.sequence.num_computed + new) if new > 1 else 0
        self._launched.append(StepWork(len(plan.entries), tokens, context, pairs))

    def collected(self) -> None:
        """The oldest launched step's tokens are on the host."""
        now_ns = self._clock_ns()
        assert self._since_ns is not None
        self.rows.append((*self._launched.popleft(), (now_ns - self._since_ns) / 1e9))
        self._since_ns = now_ns

    def idle(self) -> None:
        """Nothing is left to do, or nothing may be done yet."""
        self._since_ns = None

    def reset(self) -> None:
        self._launched.clear()
        self.rows = []
        self.idle()
