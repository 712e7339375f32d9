"""From measured steps to a model of their times, and the file that keeps it."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from infermix.cost.calibration_file import (
    STEP_TIMES_VERSION,
    Conditions,
    Machine,
    StepTimes,
    make_step_times,
    read_step_times,
    write_step_times,
)
from infermix.cost.step_model import FittedSteps, Roofline, StepWork, fit_steps
from infermix.engine.simulated.step_clock import StepClock
from infermix.engine.step_log import StepLog
from infermix.errors import UserError
from infermix.roles.scheduler import Plan, Scheduled

MACHINE = Machine(
    device="cpu", name="Test CPU", memory_bytes=1 << 34, num_cores=2, fingerprint="f",
    copy_bytes_per_s=1e10, matmul_flops_per_s={"float32": 1e11},
)  # fmt: skip
PER_STEP = {"weight_bytes": 1e7, "kv_bytes_per_token": 1e3, "flops_per_token": 1e6, "flops_per_pair": 1e2}


def conditions(**changes: Any) -> Conditions:
    made = Conditions(
        machine=MACHINE, model="m", model_digest="d", dtype="float32", parts={}, packages={}, per_step=PER_STEP
    )
    return msgspec.structs.replace(made, **changes)


def true_seconds(work: StepWork) -> float:
    """A machine that is bound by weights up to 32 tokens, then by products."""
    products = 0.004 + 0.0001 * max(0, work.new_tokens - 32)
    return 0.001 + products + 0.0002 * work.num_seqs + 2e-7 * work.context_tokens + 1e-8 * work.pairs


def works(count: int, seed: int) -> list[StepWork]:
    random, made = Random(seed), []
    for _ in range(count):
        num_seqs = random.randint(1, 16)
        prompt = random.choice([0, 0, random.randint(1, 400)])
        made.append(StepWork(num_seqs, num_seqs + prompt, num_seqs * random.randint(1, 900), prompt**2 // 2))
    return made


def test_a_fit_predicts_steps_that_it_has_not_seen() -> None:
    seen, unseen = works(400, 0), works(200, 1)
    model = FittedSteps(fit_steps(seen, [true_seconds(work) for work in seen]))
    errors = [abs(model.seconds(work) / true_seconds(work) - 1) for work in unseen]
    assert max(errors) < 0.05
    assert sorted(errors)[len(errors) // 2] < 0.01


def test_time_never_falls_with_more_work() -> None:
    random, seen = Random(2), works(300, 2)
    noisy = [true_seconds(work) * random.lognormvariate(0, 0.3) for work in seen]
    model = FittedSteps(fit_steps(seen, noisy))
    for work in seen:
        for more in (work._replace(new_tokens=work.new_tokens + 50), work._replace(context_tokens=10**5)):
            assert model.seconds(more) >= model.seconds(work) > 0


def test_steps_that_lost_the_core_shape_nothing_but_count_in_the_total() -> None:
    seen = works(400, 3)
    times = [true_seconds(work) for work in seen]
    struck = [time * (40 if index % 50 == 0 else 1) for index, time in enumerate(times)]
    model = FittedSteps(fit_steps(seen, struck))
    predicted = [model.seconds(work) for work in seen]
    assert sum(predicted) == pytest.approx(sum(struck), rel=1e-6)
    ratios = [one / other for one, other in zip(predicted, times, strict=True)]
    assert max(ratios) / min(ratios) < 1.1


def made(**changes: Any) -> StepTimes:
    seen = works(200, 4)
    rows = [(*work, true_seconds(work)) for work in seen]
    return make_step_times(rows, conditions(**changes), "2026-01-02T03:04:05Z", ["run"])


def test_the_file_holds_what_was_fitted(tmp_path: Path) -> None:
    found, path = made(), tmp_path / "c.json"
    write_step_times(found, path)
    again = read_step_times(path)
    assert again == found
    assert again.version == STEP_TIMES_VERSION
    assert again.residuals.p99 < 0.05
    assert again.residuals.total_ratio == pytest.approx(1)
    assert again.most["num_seqs"] == 16
    assert again.roofline == Roofline(**PER_STEP, bytes_per_s=1e10, flops_per_s=1e11)


def test_bad_files_are_told_by_name(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with pytest.raises(UserError, match="cannot be read"):
        read_step_times(path)
    path.write_text("{}")
    with pytest.raises(UserError, match=r"c.json: holds no calibration"):
        read_step_times(path)
    for change in ({"version": 99}, {"coefficients": {"step": 1.0}}):
        write_step_times(msgspec.structs.replace(made(), **change), path)
        with pytest.raises(UserError, match=r"c.json: (is of version 99|has other coefficients)"):
            read_step_times(path)


@pytest.mark.parametrize(
    ("value", "told"), [(-1e-6, "'step' is -1e-06 s"), (1e300, "'step' is 1e\\+300 s"), (0.0, "coefficients are 0")]
)
def test_times_that_run_backwards_or_stand_still_are_refused(tmp_path: Path, value: float, told: str) -> None:
    good = made()
    write_step_times(
        msgspec.structs.replace(good, coefficients=dict.fromkeys(good.coefficients, value)), tmp_path / "c"
    )
    with pytest.raises(UserError, match=told):
        read_step_times(tmp_path / "c")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"per_step": {"weight_bytes": 1e7}}, "c: conditions.per_step has weight_bytes, not weight"),
        ({"per_step": {**PER_STEP, "extra": 1.0}}, "c: conditions.per_step has extra, flops_per_pair"),
        ({"per_step": {**PER_STEP, "weight_bytes": -1e7}}, "c: 'weight_bytes' is -1e\\+07, not above 0"),
        ({"machine": msgspec.structs.replace(MACHINE, copy_bytes_per_s=-1.0)}, "c: 'copy_bytes_per_s' is -1, not"),
    ],
)  # fmt: skip
def test_a_roofline_that_was_edited_is_told(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    """Else the time of steps would be negative, or the cell end in a TypeError."""
    good = made()
    write_step_times(msgspec.structs.replace(good, conditions=conditions(**change)), tmp_path / "c")
    with pytest.raises(UserError, match=told):
        read_step_times(tmp_path / "c")
    without = conditions(per_step={**PER_STEP, "kv_bytes_per_token": 0.0, "flops_per_pair": 0.0})
    write_step_times(msgspec.structs.replace(good, conditions=without), tmp_path / "c")
    read_step_times(tmp_path / "c")  # a model without attention


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UserError, match="3 steps were measured, at least 100"):
        make_step_times([(1, 1, 1, 0, 0.1)] * 3, conditions(), "", [])


def test_beyond_what_was_measured_no_step_beats_the_roofline() -> None:
    found = made()
    assert found.roofline is not None
    clock = StepClock(found, found.roofline)
    known, huge = StepWork(4, 4, 400, 0), StepWork(16, 10**7, 10**7, 10**9)
    assert clock.seconds(known) == pytest.approx(found.model.seconds(known))
    assert clock.counters()["extrapolated_step_times"] == 0
    assert clock.seconds(huge) >= found.roofline.seconds(huge)
    assert clock.counters() == {"step_times": 2, "extrapolated_step_times": 1}


def test_other_parts_scale_by_their_roofline() -> None:
    found = made()
    half = Roofline(**{**PER_STEP, "weight_bytes": 5e6, "flops_per_token": 0}, bytes_per_s=1e10, flops_per_s=1e11)
    work = StepWork(1, 1, 10, 0)
    assert found.roofline is not None
    expected = found.model.seconds(work) * half.seconds(work) / found.roofline.seconds(work)
    assert StepClock(found, half).seconds(work) == pytest.approx(expected)
    assert expected < 0.6 * found.model.seconds(work)


def test_the_log_counts_the_time_between_reads_and_not_idleness() -> None:
    now = [0]
    log = StepLog(lambda: now[0])

    def step(*entries: tuple[int, int], takes: int) -> None:
        log.begin()
        plan = [Scheduled(SimpleNamespace(num_computed=done), new) for done, new in entries]  # type: ignore[arg-type]
        log.launched(Plan(plan))
        now[0] += takes
        log.collected()

    step((0, 5), takes=10**9)
    now[0] += 10**8  # between two steps of a busy engine: part of the next one
    step((5, 1), (0, 3), takes=10**9)
    log.idle()
    now[0] += 10**10
    step((6, 1), takes=10**9)
    assert log.rows == [(1, 5, 5, 15, 1.0), (2, 4, 9, 6, 1.1), (1, 1, 7, 0, 1.0)]
