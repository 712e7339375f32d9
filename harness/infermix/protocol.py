"""What the parent and the child of one cell say to each other: JSON, one message a line.

The parent sends a command; the child answers with any number of `Progress` and then one result or `Failed`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from infermix.record.record import PartRecord, QualityRecord, Repeat, State
from infermix.spec.experiment import Cell


class Setup(msgspec.Struct, tag="setup", frozen=True, kw_only=True):
    """Load everything and warm up. `extra_plugins` are modules or `.py` files to register beside entry points.

    `repeats` bounds the repeat indices that will be asked for.
    """

    cell: Cell
    repeats: int
    extra_plugins: tuple[str, ...] = ()


class RunRepeat(msgspec.Struct, tag="repeat", frozen=True, kw_only=True):
    """Measure one repeat of the workload. `companions` are other processes that may be on the device."""

    index: int
    companions: tuple[int, ...] = ()


class Profile(msgspec.Struct, tag="profile", frozen=True, kw_only=True):
    """Run one more repeat under the profiler and write its trace to `path`."""

    path: str


class Evaluate(msgspec.Struct, tag="quality", frozen=True, kw_only=True):
    """Run the quality evaluators."""


class Prepare(msgspec.Struct, tag="prepare", frozen=True, kw_only=True):
    """Do what the cell's parts need done once, before any cell is timed, and keep it in the cache."""

    cell: Cell
    extra_plugins: tuple[str, ...] = ()


class MeasureCeilings(msgspec.Struct, tag="ceilings", frozen=True, kw_only=True):
    """Measure copy bandwidth and matmul rate of `device`; needs no `Setup`."""

    device: str


class Close(msgspec.Struct, tag="close", frozen=True, kw_only=True):
    """Release the engine and exit."""


Command = Setup | RunRepeat | Profile | Evaluate | Prepare | MeasureCeilings | Close


class Progress(msgspec.Struct, tag="progress", frozen=True, kw_only=True):
    """`fraction` of the phase that is done, 0 to 1."""

    phase: str
    fraction: float = 0.0


class SetupDone(msgspec.Struct, tag="setup_done", kw_only=True):
    """The cell is warm. `memory` is in bytes, `concurrency` the workload's."""

    model: dict[str, Any]
    device: str
    dtype: str
    engine: PartRecord
    parts: dict[str, PartRecord]
    transforms: list[PartRecord] = []
    limits: dict[str, int]
    warmup_repeats: int
    warmup_steady: bool | None
    concurrency: int | None
    phases_s: dict[str, float] = {}
    memory: dict[str, float] = {}
    self_check: dict[str, Any] = {}
    environment: dict[str, Any] = {}


class OutputFigures(msgspec.Struct, kw_only=True):
    """What came out of one repeat, for the gate against degenerate outputs.

    `degenerate` counts outputs of one repeated token, `empty` outputs without a token. `single_token` is set when
    one and the same token is all that any output holds.
    """

    outputs: int = 0
    degenerate: int = 0
    empty: int = 0
    single_token: int | None = None


class RepeatDone(msgspec.Struct, tag="repeat_done", kw_only=True):
    """`first` are the first outputs, as stored in the record."""

    repeat: Repeat
    figures: OutputFigures
    elapsed_s: float
    first: list[dict[str, Any]] = []
    memory: dict[str, float] = {}
    executed: dict[str, Any] = {}


class QualityDone(msgspec.Struct, tag="quality_done", kw_only=True):
    quality: dict[str, QualityRecord] = {}
    notes: list[str] = []
    memory: dict[str, float] = {}
    phases_s: dict[str, float] = {}


class CeilingsDone(msgspec.Struct, tag="ceilings_done", kw_only=True):
    copy_bytes_per_s: float | None
    matmul_flops_per_s: dict[str, float]
    measured_at: str


class Done(msgspec.Struct, tag="done", kw_only=True):
    """A command without a result of its own has ended."""

    notes: list[str] = []


class Failed(msgspec.Struct, tag="failed", kw_only=True):
    """The command raised; `state` is the state of the row."""

    state: State
    reason: str
    traceback: str = ""


Reply = Progress | SetupDone | RepeatDone | QualityDone | CeilingsDone | Done | Failed
