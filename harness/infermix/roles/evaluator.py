"""Role: evaluator. Quality through `Engine.score` and `Engine.submit` of the very cell that was timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from infermix.roles.component import Options

if TYPE_CHECKING:
    from pathlib import Path

    from infermix.roles.engine import Engine


class EvaluatorOptions(Options, frozen=True, kw_only=True):
    """Base of evaluator options: what `plan` may ask before anything runs."""

    def max_tokens(self) -> int | None:
        """Longest sequence that it scores or generates, prompt included; `None` when only the data tells."""
        return None

    def check(self, base: Path) -> None:
        """Read the files that the options name, relative to `base`, before anything runs.

        Raises `UserError` for one that is missing or holds bad data, with file and line where there is one. What
        needs a tokenizer is left to the run.
        """


@dataclass(frozen=True, kw_only=True)
class EvaluatorContext:
    """`reference()` builds an engine from the reference parts and the unquantized weights; the caller closes it."""

    base: Path
    seed: int
    reference: Callable[[], Engine]
    progress: Callable[[str, float], None] = lambda phase, fraction: None


@dataclass(kw_only=True)
class Quality:
    """One metric. `name` carries the protocol; `better` is `lower` or `higher`; `samples` allow paired comparison."""

    name: str
    value: float
    unit: str
    better: str
    stderr: float | None = None
    samples: list[float] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


class Evaluator(Protocol):
    def evaluate(self, engine: Engine) -> list[Quality]: ...
