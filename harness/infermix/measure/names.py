"""The names under `measure.gates`, `measure.guards` and `measure.goodput`: checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from infermix.errors import nearest
from infermix.measure.goodput import GOODPUT_LIMITS
from infermix.measure.guards import GUARD_LIMITS
from infermix.spec.experiment import Measure

#: `perplexity_ratio`: most times the baseline's perplexity. `top1_agreement`: least agreement of a lossless mix with
#: the reference parts, below float32. `degenerate_share`: most outputs of one repeated token beyond the baseline's.
#: `empty_share`: most outputs without any token.
DEFAULT_GATES: Mapping[str, float] = {
    "perplexity_ratio": 1.5,
    "top1_agreement": 0.9,
    "degenerate_share": 0.5,
    "empty_share": 0.5,
}

_KNOWN: Mapping[str, tuple[str, Iterable[str]]] = {
    "gates": ("gate", DEFAULT_GATES),
    "guards": ("guard", GUARD_LIMITS),
    "goodput": ("goodput limit", GOODPUT_LIMITS),
}


@dataclass(frozen=True)
class Fault:
    """What is wrong at `path` below `measure`; `of_name` when the name is unknown, not its value."""

    path: tuple[str, str]
    message: str
    hint: str | None = None
    of_name: bool = False


def measure_faults(measure: Measure) -> list[Fault]:
    """Unknown names with the nearest one, and values that are negative or not finite."""
    faults = []
    for section, (title, known) in _KNOWN.items():
        for name, value in getattr(measure, section).items():
            if name not in known:
                hint = nearest(name, known)
                faults.append(Fault((section, name), f"there is no {title} {name!r}", hint, of_name=True))
            elif not math.isfinite(value) or value < 0:
                faults.append(Fault((section, name), f"expected a finite number from 0 on, got {value:g}"))
    return faults
