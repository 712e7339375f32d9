"""The file that `infermix calibrate` writes: coefficients of step times with the conditions they hold under."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from infermix.cost.header_cache import write_atomically
from infermix.cost.step_model import FEATURES, FittedSteps, Roofline, StepWork, fit_steps
from infermix.errors import UserError
from infermix.roles.facts import Ceilings, MachineFacts

STEP_TIMES_VERSION = 1
#: Fewer steps than this say nothing about so many coefficients.
LEAST_STEPS = 100
#: No part of a step takes longer.
MOST_COEFFICIENT_S = 1e6
#: The figures of `Roofline` that a machine's ceilings are not.
PER_STEP = ("weight_bytes", "kv_bytes_per_token", "flops_per_token", "flops_per_pair")
#: Of models without attention, or without KV.
_MAY_BE_ZERO = frozenset({"kv_bytes_per_token", "flops_per_pair"})


class Machine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The device that was measured; its ceilings are those of `infermix doctor --measure`."""

    device: str
    name: str
    memory_bytes: int
    num_cores: int
    fingerprint: str
    copy_bytes_per_s: float | None = None
    matmul_flops_per_s: dict[str, float] = {}


class Conditions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`parts` are name and options of every part but the scheduler, of transforms and of the engine.

    `per_step` are the bytes and FLOPs of `step_model.Roofline`, without the machine's ceilings.
    """

    machine: Machine
    model: str
    model_digest: str
    dtype: str
    parts: dict[str, Any]
    packages: dict[str, str]
    per_step: dict[str, float] = {}
    num_threads: int | None = None


class Residuals(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """|predicted / measured - 1| over the fitted steps, and predicted over measured total time."""

    steps: int
    p50: float
    p90: float
    p99: float
    total_ratio: float


class StepTimes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`most` is the largest value of each field of `StepWork` that was seen; `runs` are the records behind it."""

    version: int
    created: str
    conditions: Conditions
    coefficients: dict[str, float]
    most: dict[str, int]
    residuals: Residuals
    runs: list[str] = []

    @property
    def model(self) -> FittedSteps:
        return FittedSteps([self.coefficients[name] for name in FEATURES])

    @property
    def roofline(self) -> Roofline | None:
        """Of what was measured; `None` without the machine's ceilings."""
        conditions = self.conditions
        bytes_per_s = conditions.machine.copy_bytes_per_s
        flops_per_s = conditions.machine.matmul_flops_per_s.get(conditions.dtype)
        if not (bytes_per_s and flops_per_s and conditions.per_step):
            return None
        return Roofline(**conditions.per_step, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s)


def make_step_times(
    rows: Sequence[Sequence[float]], conditions: Conditions, created: str, runs: list[str]
) -> StepTimes:
    """Fit rows of `StepWork` and seconds. Raises `UserError` for too few of them."""
    if len(rows) < LEAST_STEPS:
        raise UserError(
            f"{len(rows)} steps were measured, at least {LEAST_STEPS} are needed", hint="use a longer workload"
        )
    works = [StepWork(*map(int, row[:4])) for row in rows]
    seconds = [row[4] for row in rows]
    coefficients = fit_steps(works, seconds)
    model, times = FittedSteps(coefficients), np.array(seconds)
    predicted = np.array([model.seconds(work) for work in works])
    off = np.abs(predicted / times - 1)
    p50, p90, p99 = (float(value) for value in np.percentile(off, (50, 90, 99)))
    return StepTimes(
        version=STEP_TIMES_VERSION,
        created=created,
        conditions=conditions,
        coefficients=dict(zip(FEATURES, coefficients, strict=True)),
        most={name: max(getattr(work, name) for work in works) for name in StepWork._fields},
        residuals=Residuals(
            steps=len(rows), p50=p50, p90=p90, p99=p99, total_ratio=float(predicted.sum() / times.sum())
        ),
        runs=runs,
    )


def write_step_times(found: StepTimes, path: Path) -> None:
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    write_atomically(path, text + "\n")


def read_step_times(path: Path) -> StepTimes:
    """Raises `UserError` naming the file for one that is missing, not a calibration, or of another version."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=StepTimes)
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}", where=str(path), hint="`infermix calibrate` writes one"
        ) from None
    except msgspec.DecodeError as error:
        hint = "`infermix calibrate` writes one"
        raise UserError(f"holds no calibration of step times: {error}", where=str(path), hint=hint) from None
    if found.version != STEP_TIMES_VERSION:
        raise UserError(
            f"is of version {found.version}, this program reads {STEP_TIMES_VERSION}",
            where=str(path),
            hint="calibrate again",
        )
    if set(found.coefficients) != set(FEATURES) or list(found.most) != list(StepWork._fields):
        raise UserError("has other coefficients than this program knows", where=str(path), hint="calibrate again")
    wrong = next((name for name, value in found.coefficients.items() if not 0 <= value <= MOST_COEFFICIENT_S), None)
    if wrong is not None or not any(found.coefficients.values()):
        told = f"coefficient {wrong!r} is {found.coefficients[wrong]:g} s" if wrong else "all coefficients are 0"
        raise UserError(f"{told}, so steps would take no time that there is", where=str(path), hint="calibrate again")
    _check_roofline(found.conditions, path)
    return found


def _check_roofline(conditions: Conditions, path: Path) -> None:
    """Its figures are all there (or none), and no step takes no time: times are scaled by them."""
    figures, machine = conditions.per_step, conditions.machine
    if figures and set(figures) != set(PER_STEP):
        told = f"conditions.per_step has {', '.join(sorted(figures))}, not {', '.join(PER_STEP)}"
        raise UserError(told, where=str(path), hint="calibrate again")
    ceilings = {"copy_bytes_per_s": machine.copy_bytes_per_s, **machine.matmul_flops_per_s}
    for name, value in {**figures, **ceilings}.items():
        if value is not None and (value < 0 or (value == 0 and name not in _MAY_BE_ZERO)):
            raise UserError(f"{name!r} is {value:g}, not above 0", where=str(path), hint="calibrate again")


def machine_of_facts(machine: MachineFacts) -> Machine:
    return Machine(
        device=machine.device, name=machine.name, memory_bytes=machine.memory_bytes, num_cores=machine.num_cores,
        fingerprint=machine.fingerprint, copy_bytes_per_s=machine.ceilings.copy_bytes_per_s,
        matmul_flops_per_s=dict(machine.ceilings.matmul_flops_per_s),
    )  # fmt: skip


def facts_of_machine(machine: Machine) -> MachineFacts:
    """The measured machine, wherever the simulation runs."""
    return MachineFacts(
        device=machine.device, name=machine.name, memory_bytes=machine.memory_bytes, num_cores=machine.num_cores,
        fingerprint=machine.fingerprint,
        ceilings=Ceilings(machine.copy_bytes_per_s, dict(machine.matmul_flops_per_s)),
    )  # fmt: skip
