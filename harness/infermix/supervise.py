"""The parent's view of one cell: drives its child and keeps every answer, so that a late failure loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from infermix.cell.answers import Answers
from infermix.cell.gates import self_check_failure
from infermix.failure import CellFailure
from infermix.isolate import Child, ignore_progress
from infermix.protocol import Done, Evaluate, Profile, Progress, QualityDone, RepeatDone, RunRepeat, Setup, SetupDone

if TYPE_CHECKING:
    from infermix.compose import CellPlan


class Supervised:
    """A live cell. Its methods return whether the cell is still well; failures end up in `answers`."""

    def __init__(
        self,
        plan: CellPlan,
        *,
        extra_plugins: tuple[str, ...] = (),
        on_progress: Callable[[Progress], None] = ignore_progress,
    ) -> None:
        self.plan = plan
        self.answers = Answers()
        self._extra_plugins, self._on_progress = extra_plugins, on_progress
        limits = plan.cell.experiment.limits
        self._child = Child(time_limit_s=plan.time_limit_s, num_threads=limits.num_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Whatever happened, no process is left behind."""
        self._child.end()
        self.answers.start_s = self._child.start_s
        self.answers.log = self._child.log.lines

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def well(self) -> bool:
        return self.answers.failure is None

    def setup(self) -> bool:
        repeats = self.plan.cell.experiment.measure.repeats
        command = Setup(cell=self.plan.cell, repeats=repeats, extra_plugins=self._extra_plugins)
        return self._guarded(lambda: self._set_up(command))

    def repeat(self, index: int, companions: tuple[int, ...] = ()) -> bool:
        """Measure repeat `index` (0-based)."""
        total = self.plan.cell.experiment.measure.repeats
        self._on_progress(Progress(phase=f"repeat {index + 1} of {total}", fraction=index / total))
        command = RunRepeat(index=index, companions=companions)
        return self._guarded(lambda: self.answers.repeats.append(self._child.ask(command, RepeatDone)))

    def evaluate(self) -> bool:
        def ask() -> None:
            self.answers.quality = self._child.ask(Evaluate(), QualityDone, self._on_progress)
            self.answers.notes += self.answers.quality.notes

        return self._guarded(ask)

    def profile(self, path: Path) -> bool:
        """A trace of one more repeat. A profiler that fails costs the trace, not the cell."""
        try:
            done = self._child.ask(Profile(path=str(path)), Done, self._on_progress)
            self.answers.notes += done.notes
        except CellFailure as failure:
            self.answers.notes.append(f"no trace: {failure.reason}")
        return self.well

    def close(self) -> None:
        """Ask the child to release its engine; only the end of the `with` block is certain."""
        if self.well:
            self._child.close()

    def _set_up(self, command: Setup) -> None:
        self.answers.setup = self._child.ask(command, SetupDone, self._on_progress)
        wrong = self_check_failure(self.answers.setup.self_check)
        if wrong:
            raise CellFailure("wrong", wrong)

    def _guarded(self, ask: Callable[[], None]) -> bool:
        assert self.well, "this cell has already ended"
        try:
            ask()
        except CellFailure as failure:
            self.answers.failure = failure
        return self.well
