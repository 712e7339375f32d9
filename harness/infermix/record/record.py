"""The record: one JSON file that says what ran, how, and what was measured."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from infermix.record.gaps import GapHistogram

SCHEMA_VERSION = 1

State = Literal["ok", "invalid", "oom", "timeout", "error", "wrong"]
Verdict = Literal["green", "yellow", "red"]


class Metric(msgspec.Struct, kw_only=True):
    """One figure. `samples` are one value per repeat; `value` is their geometric mean (the arithmetic one where a
    sample is 0), the interval is over repeats (95 %).
    """

    value: float
    unit: str
    better: Literal["higher", "lower", "none"] = "none"
    samples: list[float] = []
    ci_low: float | None = None
    ci_high: float | None = None


class GuardResult(msgspec.Struct, kw_only=True):
    """One check of the measurement itself; machine-readable verdict, a sentence for people."""

    name: str
    verdict: Verdict
    detail: str = ""
    value: float | None = None
    limit: float | None = None


class PartRecord(msgspec.Struct, kw_only=True):
    """What was asked for and what executed."""

    name: str
    options: dict[str, Any] = {}
    distribution: str = ""
    version: str = ""
    lossless: bool = True
    via: dict[str, str] = {}
    executed: dict[str, Any] = {}


class OutputSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One more output of a request that asked for several; fields as in `RequestSample`."""

    emissions: list[tuple[float, int]] = []
    finish_reason: str = ""
    output_ids: list[int] = []


class RequestSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of one repeat; times in seconds from the start of the repeat, `emissions` as (time_s,
    tokens). `emissions`, `finish_reason` and `output_ids` are those of its first output, `more_outputs` the others.

    `late_s` is how late the load generator sent it, time inside the engine apart. `error` says why it
    failed; `output_ids` are kept for the first few requests only.
    """

    request_id: str
    arrival_s: float
    sent_s: float
    input_tokens: int
    emissions: list[tuple[float, int]]
    finish_reason: str
    category: str = ""
    tenant: str = ""
    late_s: float = 0.0
    error: str = ""
    output_ids: list[int] = []
    more_outputs: list[OutputSample] = []

    @property
    def outputs(self) -> list[RequestSample | OutputSample]:
        """All outputs, the first one first."""
        return [self, *self.more_outputs]


class Repeat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Raw samples of one repeat.

    With `gaps`, `emissions` hold only the first token and all others with the last, and the times between tokens are
    there. With `figures`, `requests` are but a sample, and the figures are those of all.
    """

    wall_s: float
    requests: list[RequestSample]
    steps: int = 0
    generator_late_s: float = 0.0
    environment: dict[str, Any] = {}
    gaps: GapHistogram | None = None
    figures: dict[str, float] = {}


class QualityRecord(msgspec.Struct, kw_only=True):
    """One quality metric; its name carries the protocol."""

    value: float
    unit: str
    better: Literal["higher", "lower"]
    stderr: float | None = None
    samples: list[float] = []
    details: dict[str, Any] = {}


class Summary(msgspec.Struct, kw_only=True):
    """What tables need of a record: everything but the raw samples, the outputs and the log.

    `simulated`: nothing was measured, a model of step times on a virtual clock said when tokens would come.
    `experiment` is the resolved experiment as plain data, without its sweep; `data` the sha256 of every file that its
    options name (`workload.path` -> sha256). `track` groups comparable rows
    (see `record.track`). `model` holds at least `digest` (of the configuration, whatever the dtype) and
    `label`; `environment` is what `capture_environment` returned. `paired` is set when the cell was interleaved
    with its baseline (`measure.interleave`): `mode` (`alternating` or `by process`, or `none` with a `reason`),
    `order`, `baseline` (run id), `baseline_samples` (metric -> one value per repeat) and `ratios`.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str
    created: str
    experiment_name: str
    cell: str
    cell_digest: str
    overrides: dict[str, Any] = {}
    baseline: bool = False
    track: str = ""
    experiment: dict[str, Any] = {}
    data: dict[str, str] = {}
    simulated: bool = False
    state: State
    reason: str = ""
    device: str = ""
    dtype: str = ""
    model: dict[str, Any] = {}
    engine: PartRecord | None = None
    parts: dict[str, PartRecord] = {}
    transforms: list[PartRecord] = []
    metrics: dict[str, Metric] = {}
    quality: dict[str, QualityRecord] = {}
    guards: list[GuardResult] = []
    phases_s: dict[str, float] = {}
    memory: dict[str, float] = {}
    roofline: dict[str, Any] = {}
    self_check: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    counters: dict[str, float] = {}
    paired: dict[str, Any] = {}
    complete: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst guard: the colour of the row."""
        order: tuple[Verdict, ...] = ("green", "yellow", "red")
        return max((guard.verdict for guard in self.guards), key=order.index, default="green")


class Record(Summary, kw_only=True):
    """One execution of one cell. `complete` is set when nothing is left to do for it, whatever its state."""

    repeats: list[Repeat] = []
    outputs: list[dict[str, Any]] = []
    log: list[str] = []
