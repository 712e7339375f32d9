"""What a record says of a cell that was not measured but simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infermix.engine.simulated.components import SIMULATED
from infermix.record.record import GuardResult, Record, Verdict

if TYPE_CHECKING:
    from infermix.compose import CellPlan

#: Share of steps larger than any measured one, up to which a calibration is taken to hold.
MOST_EXTRAPOLATED = 0.05


def is_simulated(plan: CellPlan) -> bool:
    if plan.facts is None:
        return False
    return SIMULATED in plan.engine.component.provides(plan.engine.options, plan.facts, plan.machine)


def simulation_guard(record: Record) -> list[GuardResult]:
    """Yellow when the step times were not measured with these parts, or not for steps of this size."""
    if not record.simulated or record.engine is None:
        return []
    times = record.engine.executed.get("step_times", {})
    asked = record.counters.get("step_times", 0.0)
    share = record.counters.get("extrapolated_step_times", 0.0) / asked if asked else 0.0
    told = [f"{share:.1%} of the steps are larger than any that was measured"]
    if times.get("from") != "calibration":
        told = ["no calibration: step times are a share of the roofline"]
    if times.get("differs"):
        told.append(f"calibrated with another {', '.join(times['differs'])}")
    doubtful = share > MOST_EXTRAPOLATED or bool(times.get("differs"))
    verdict: Verdict = "yellow" if doubtful else "green"
    return [
        GuardResult(name="calibration", verdict=verdict, detail="; ".join(told), value=share, limit=MOST_EXTRAPOLATED)
    ]
