"""What a cell has answered so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from infermix.failure import CellFailure
from infermix.protocol import QualityDone, RepeatDone, SetupDone


@dataclass
class Answers:
    """Filled as the cell goes on; `failure` is set when it ended early. `log` is what its process printed."""

    setup: SetupDone | None = None
    repeats: list[RepeatDone] = field(default_factory=list)
    quality: QualityDone | None = None
    failure: CellFailure | None = None
    start_s: float | None = None
    notes: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
