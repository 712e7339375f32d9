"""Where the time of a simulated step comes from, and how far the steps are from those that were measured."""

from __future__ import annotations

from collections.abc import Callable

from infermix.cost.calibration_file import StepTimes
from infermix.cost.step_model import Roofline, StepWork


class StepClock:
    """Seconds of a step.

    With a calibration: its curve, and beyond what was measured at least the roofline. Other parts than those that
    were calibrated scale it by the ratio of their rooflines. Without one: the roofline over `efficiency`, plus
    `overhead_s`.
    """

    def __init__(
        self,
        fitted: StepTimes | None,
        roofline: Roofline | None,
        *,
        efficiency: float = 1.0,
        overhead_s: float = 0.0,
    ) -> None:
        assert fitted is not None or roofline is not None
        self._fitted, self._roofline = fitted, roofline
        self._curve = None if fitted is None else fitted.model.seconds
        theirs = None if fitted is None else fitted.roofline
        self._theirs = None if theirs == roofline else theirs
        self._efficiency, self._overhead_s = efficiency, overhead_s
        self._most = () if fitted is None else tuple(fitted.most.values())
        self.reset()

    def reset(self) -> None:
        self._asked = self._beyond = 0

    def counters(self) -> dict[str, float]:
        """Times that were asked for, and those of steps larger than any that was measured."""
        return {"step_times": float(self._asked), "extrapolated_step_times": float(self._beyond)}

    @property
    def seconds(self) -> Callable[[StepWork], float]:
        return self._estimated if self._curve is None else self._measured

    def _estimated(self, work: StepWork) -> float:
        assert self._roofline is not None
        self._asked += 1
        self._beyond += 1
        return self._roofline.seconds(work) / self._efficiency + self._overhead_s

    def _measured(self, work: StepWork) -> float:
        assert self._curve is not None
        self._asked += 1
        found = self._curve(work)
        if self._theirs is not None and self._roofline is not None:
            found *= self._roofline.seconds(work) / self._theirs.seconds(work)
        if work[0] > self._most[0] or work[1] > self._most[1] or work[2] > self._most[2] or work[3] > self._most[3]:
            self._beyond += 1
            if self._roofline is not None:
                found = max(found, self._roofline.seconds(work))
        return found
