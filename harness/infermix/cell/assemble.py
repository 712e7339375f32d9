"""From the answers of a cell to its record."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from infermix.cell.gates import Baseline, Evidence, failed_gates, output_shares
from infermix.cell.parts import planned_engine, planned_parts, planned_transforms
from infermix.cell.roofline import roofline
from infermix.cell.simulation import is_simulated, simulation_guard
from infermix.measure import guards as guard
from infermix.measure.clock import utc_stamp
from infermix.measure.metrics import summarise
from infermix.record.record import GuardResult, Record, Repeat, Summary
from infermix.record.track import track_id

if TYPE_CHECKING:
    from infermix.cell.answers import Answers
    from infermix.compose import CellPlan
    from infermix.protocol import SetupDone


def planned_record(plan: CellPlan, environment: dict[str, Any]) -> Record:
    """What is known of a cell before it runs: `invalid` with its reasons, until something better is known.

    `environment` is the parent's; that of the child replaces it.
    """
    cell, created = plan.cell, utc_stamp()
    record = Record(
        run_id=f"{created.replace(':', '').replace('-', '')}-{secrets.token_hex(3)}",
        created=created,
        experiment_name=cell.experiment.name,
        cell=cell.name,
        cell_digest=cell.digest,
        overrides=msgspec.to_builtins(cell.overrides),
        baseline=cell.baseline,
        experiment=_shareable(msgspec.to_builtins(cell.experiment)),
        data=dict(cell.data),
        simulated=is_simulated(plan),
        state="invalid",
        reason="; ".join(plan.reasons),
        device=plan.device,
        dtype=plan.dtype,
        model=_planned_model(plan),
        engine=planned_engine(plan),
        parts=planned_parts(plan),
        transforms=planned_transforms(plan),
        environment=environment,
    )
    record.track = track_id(record)
    return record


def assemble(plan: CellPlan, answers: Answers, baseline: Summary | None, environment: dict[str, Any]) -> Record:
    """The complete record of a cell that was run. Only `ok` cells get metrics; raw repeats are always kept."""
    record = planned_record(plan, environment)
    _add_setup(record, answers)
    _add_repeats(record, answers)
    if answers.quality is not None:
        record.quality = answers.quality.quality
        record.phases_s.update(answers.quality.phases_s)
        record.memory.update(answers.quality.memory)
    record.log = [*plan.notes, *answers.notes, *answers.log]
    record.track = track_id(record)
    record.complete = True
    _judge(record, plan, answers, baseline)
    if record.state == "ok":
        _add_metrics(record, plan, answers)
    return record


def _shareable(experiment: dict[str, Any]) -> dict[str, Any]:
    """Without the folder of the YAML file, which says something about the user and nothing about the run."""
    return {**experiment, "base": "."}


def _planned_model(plan: CellPlan) -> dict[str, Any]:
    if plan.facts is None:
        return {"label": plan.cell.experiment.model.source}
    label = plan.source.label if plan.source else plan.facts.source
    return {"label": label, "digest": plan.facts.digest, "dummy_weights": plan.facts.dummy_weights}


def _add_setup(record: Record, answers: Answers) -> None:
    setup = answers.setup
    record.phases_s = {} if answers.start_s is None else {"start": answers.start_s}
    if setup is None:
        return
    record.phases_s.update(setup.phases_s)
    record.device, record.dtype, record.model = setup.device, setup.dtype, setup.model
    record.engine, record.parts, record.transforms = setup.engine, setup.parts, setup.transforms
    record.self_check, record.environment = setup.self_check, setup.environment
    record.memory = dict(setup.memory)
    record.counters = {"warmup_repeats": float(setup.warmup_repeats), **_floats(setup.limits)}


def _add_repeats(record: Record, answers: Answers) -> None:
    done = answers.repeats
    if not done:
        return
    record.repeats = [each.repeat for each in done]
    record.outputs = done[0].first
    record.memory.update(done[-1].memory)
    if "peak_measure_bytes" in record.memory:
        record.memory["peak_bytes"] = record.memory["peak_measure_bytes"]
    record.phases_s["measure"] = sum(each.elapsed_s for each in done)
    record.counters.update(_mean_counters(record.repeats))
    record.counters.update(output_shares([each.figures for each in done]))
    for role, executed in done[-1].executed.items():
        if role in record.parts:
            record.parts[role].executed = executed


def _judge(record: Record, plan: CellPlan, answers: Answers, baseline: Summary | None) -> None:
    if answers.failure is not None:
        record.state, record.reason = answers.failure.state, answers.failure.reason
        record.log += answers.failure.details.splitlines()
        return
    error = _nothing_succeeded(record.repeats)
    if error:
        record.state, record.reason = "error", error
        return
    gates = plan.cell.experiment.measure.gates
    reasons = failed_gates(_evidence(record, answers), _baseline_of(baseline), gates)
    record.state, record.reason = ("wrong", "; ".join(reasons)) if reasons else ("ok", "")


def _nothing_succeeded(repeats: Sequence[Repeat]) -> str | None:
    samples = [sample for repeat in repeats for sample in repeat.requests]
    if any(sample.finish_reason not in ("error", "abort") for sample in samples):
        return None
    first = next((sample.error for sample in samples if sample.error), "no reason given")
    return f"every request failed, the first with: {first}"


def _evidence(record: Record, answers: Answers) -> Evidence:
    chosen = [*record.parts.values(), *record.transforms, *([record.engine] if record.engine else [])]
    return Evidence(
        lossless=all(part.lossless for part in chosen),
        dtype=record.dtype,
        dummy=bool(record.model.get("dummy_weights")),
        self_check=record.self_check,
        outputs=[each.figures for each in answers.repeats],
        quality=record.quality,
    )


def _baseline_of(record: Summary | None) -> Baseline:
    if record is None or record.state != "ok":
        return Baseline()
    return Baseline(quality=record.quality, degenerate_share=record.counters.get("degenerate_share"))


def _add_metrics(record: Record, plan: CellPlan, answers: Answers) -> None:
    assert answers.setup is not None
    measure = plan.cell.experiment.measure
    record.metrics = summarise(record.repeats, measure.goodput)
    record.guards = [
        *_guards(record, answers.setup, measure.guards),
        *_executed_guard(record),
        *_self_check_guard(record),
        *simulation_guard(record),
    ]
    record.roofline = {"reason": "simulated"} if record.simulated else roofline(plan, record)


def _guards(record: Record, setup: SetupDone, limits: Mapping[str, float]) -> list[GuardResult]:
    evidence = guard.Evidence(
        repeats=record.repeats,
        concurrency=setup.concurrency,
        device="cpu" if record.simulated else record.device,
        steady=setup.warmup_steady,
    )
    return guard.run_guards(evidence, limits)


def _executed_guard(record: Record) -> list[GuardResult]:
    """Yellow when an engine that hosts a role does not say what executed there."""
    silent = [role for role, part in record.parts.items() if not part.executed]
    silent += [f"transform {part.name}" for part in record.transforms if not part.executed]
    if not silent:
        return []
    detail = f"the engine did not report what executed as {', '.join(silent)}"
    return [GuardResult(name="executed", verdict="yellow", detail=detail, value=float(len(silent)), limit=0.0)]


def _self_check_guard(record: Record) -> list[GuardResult]:
    """Yellow when nothing proved at load that the engine computes what the model computes."""
    if record.engine is None or record.engine.options.get("self_check") is not False:
        return []
    return [GuardResult(name="self_check", verdict="yellow", detail="switched off by the experiment")]


def _mean_counters(repeats: Sequence[Repeat]) -> dict[str, float]:
    """The engine's counters, averaged over repeats."""
    names = {name for repeat in repeats for name in repeat.environment.get("counters", {})}
    return {
        name: fmean(repeat.environment.get("counters", {}).get(name, 0.0) for repeat in repeats)
        for name in sorted(names)
    }


def _floats(figures: Mapping[str, int]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items()}
