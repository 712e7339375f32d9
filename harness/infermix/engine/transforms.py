"""Model transforms inside an assembly: each is built once, applied at its stage, timed, and reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from infermix.errors import InfermixError
from infermix.roles.transform import STAGES, ModelTransform, Stage, TransformContext, TransformReport

if TYPE_CHECKING:
    from torch import nn

    from infermix.roles.component import Choice
    from infermix.toolkit.selection import TokenSelector


class Transforms:
    """The transforms of one cell in the order of the experiment; `executed` grows as they are applied."""

    def __init__(self, choices: Sequence[Choice], context: TransformContext) -> None:
        self._context = context
        self._built = [(choice, _build(choice)) for choice in choices]
        self.executed: list[dict[str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._built)

    @property
    def selector(self) -> TokenSelector | None:
        """What the last transform that brings one picks tokens with."""
        brought = [getattr(transform, "selector", None) for _, transform in self._built]
        return next((selector for selector in reversed(brought) if selector is not None), None)

    def apply(self, stage: Stage, model: nn.Module, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """Apply those of `stage`; `phase(name)` times each."""
        for choice, transform in self._built:
            if transform.stage == stage:
                with phase(f"transform_{choice.component.name}"):
                    report = transform.apply(model, self._context)
                self.executed.append(_facts(choice, transform, report))


def _build(choice: Choice) -> ModelTransform:
    transform: ModelTransform = choice.component.build(choice.options, None)
    if transform.stage not in STAGES:
        raise InfermixError(f"transform {choice.component.name!r} has stage {transform.stage!r}, not one of {STAGES}")
    return transform


def _facts(choice: Choice, transform: ModelTransform, report: TransformReport) -> dict[str, Any]:
    kind = type(transform)
    return {
        "name": choice.component.name,
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "stage": transform.stage,
        "replaced": dict(report.replaced),
        "kept": dict(report.kept),
        "verified": {name: float(error) for name, error in report.verified.items()},
        "notes": list(report.notes),
        **({"via": dict(choice.via)} if choice.via else {}),
    }
