"""How a cell and its baseline take turns: both alive and ABBA, or one process after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from infermix.cell.answers import Answers
from infermix.measure.metrics import summarise
from infermix.measure.stats import Ratio, abba, paired_ratio, unpaired_ratio
from infermix.supervise import Supervised

if TYPE_CHECKING:
    from pathlib import Path

    from infermix.compose import CellPlan

Mode = Literal["alternating", "by process"]
Start = Callable[["CellPlan"], Supervised]

#: Share of the device that two cells together may be predicted to fill.
_BOTH_FIT_SHARE = 0.9


@dataclass
class Turns:
    """A cell beside its baseline. `order` has one letter per repeat, A for the baseline."""

    candidate: Answers
    baseline: list[Answers]
    mode: Mode
    order: str


def both_fit(candidate: CellPlan, baseline: CellPlan) -> bool:
    """Whether the predictions say that the device holds both at once."""
    if candidate.memory is None or baseline.memory is None:
        return False
    together = candidate.memory.total_bytes + baseline.memory.total_bytes
    return together <= _BOTH_FIT_SHARE * candidate.machine.memory_bytes


def run_alone(plan: CellPlan, start: Start, trace: Path | None = None) -> Answers:
    """Set up, every repeat, quality."""
    with start(plan) as cell:
        if cell.setup() and _repeats(cell, range(plan.cell.experiment.measure.repeats)):
            _finish(cell, trace)
    return cell.answers


def run_in_turns(candidate: CellPlan, baseline: CellPlan, start: Start, trace: Path | None = None) -> Turns:
    """Both alive where they fit; otherwise the baseline's repeats go half before and half after the candidate."""
    if both_fit(candidate, baseline):
        return _alternate(candidate, baseline, start, trace)
    return _by_process(candidate, baseline, start, trace)


def _alternate(candidate: CellPlan, baseline: CellPlan, start: Start, trace: Path | None) -> Turns:
    order = "".join(abba(candidate.cell.experiment.measure.repeats))
    with start(baseline) as a, start(candidate) as b:
        if a.setup() and b.setup():
            _take_turns(a, b, order)
        elif not a.well and b.setup():
            _repeats(b, range(candidate.cell.experiment.measure.repeats))
        if b.well:
            _finish(b, trace)
        a.close()
    if b.answers.failure is not None and b.answers.failure.state == "oom":
        return _by_process(candidate, baseline, start, trace)  # the prediction was wrong: they do not fit together
    return Turns(b.answers, [a.answers], "alternating", order)


def _take_turns(a: Supervised, b: Supervised, order: str) -> None:
    """A baseline that fails is left out of the remaining turns; the candidate goes on."""
    done = {"A": 0, "B": 0}
    for letter in order:
        cell, other = (a, b) if letter == "A" else (b, a)
        if cell.well:
            cell.repeat(done[letter], companions=(other.pid,))
        done[letter] += 1
        if not b.well:
            return


def _by_process(candidate: CellPlan, baseline: CellPlan, start: Start, trace: Path | None) -> Turns:
    repeats = baseline.cell.experiment.measure.repeats
    half = -(-repeats // 2)
    before = _part(baseline, start, range(half))
    answers = run_alone(candidate, start, trace)
    after = _part(baseline, start, range(half, repeats))
    order = "A" * half + "B" * candidate.cell.experiment.measure.repeats + "A" * (repeats - half)
    return Turns(answers, [before, after], "by process", order)


def _part(plan: CellPlan, start: Start, indices: range) -> Answers:
    with start(plan) as cell:
        if indices and cell.setup() and _repeats(cell, indices):
            cell.close()
    return cell.answers


def _repeats(cell: Supervised, indices: range) -> bool:
    return all(cell.repeat(index) for index in indices)


def _finish(cell: Supervised, trace: Path | None) -> None:
    if trace is not None:
        cell.profile(trace)
    if cell.evaluate():
        cell.close()


def paired_record(turns: Turns, baseline_run_id: str, goodput: Mapping[str, float]) -> dict[str, Any]:
    """For `Record.paired`: the baseline's samples of these turns, and the ratio candidate / baseline per metric."""
    theirs = [done.repeat for answers in turns.baseline for done in answers.repeats]
    ours = [done.repeat for done in turns.candidate.repeats]
    base = {"mode": turns.mode, "order": turns.order, "baseline": baseline_run_id}
    failure = next((answers.failure for answers in turns.baseline if answers.failure), None)
    if failure is not None or not theirs or not ours:
        reason = f"the baseline ended early: {failure.reason}" if failure else "nothing to pair"
        return {**base, "mode": "none", "reason": reason}
    mine, other = summarise(ours, goodput), summarise(theirs, goodput)
    ratios = {
        name: _plain(_ratio(metric.samples, other[name].samples, turns.mode))
        for name, metric in mine.items()
        if name in other and min([*metric.samples, *other[name].samples]) > 0
    }
    samples = {name: metric.samples for name, metric in other.items()}
    return {**base, "baseline_samples": samples, "ratios": ratios}


def _ratio(ours: list[float], theirs: list[float], mode: Mode) -> Ratio:
    if mode == "alternating" and len(ours) == len(theirs):
        return paired_ratio(ours, theirs)
    return unpaired_ratio(ours, theirs)


def _plain(ratio: Ratio) -> dict[str, Any]:
    return {
        "ratio": ratio.ratio,
        "low": ratio.low,
        "high": ratio.high,
        "detectable": ratio.detectable,
        "pairs": ratio.pairs,
        "significant": ratio.significant,
    }
