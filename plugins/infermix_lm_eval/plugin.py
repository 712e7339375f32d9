"""Tasks of lm-evaluation-harness as an evaluator: options only, no torch and no lm_eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from infermix.errors import UserError
from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Role
from infermix.roles.evaluator import EvaluatorOptions
from infermix.roles.facts import MachineFacts, ModelFacts
from msgspec import Meta


class LmEvalOptions(EvaluatorOptions, frozen=True, kw_only=True):
    """Which tasks, how many items of each, and how they are asked."""

    tasks: Annotated[tuple[str, ...], Meta(min_length=1, description="task, group or tag names")]
    include_path: (
        Annotated[str, Meta(description="folder with task YAML files, relative to the experiment")] | None
    ) = None
    limit: (
        Annotated[int, Meta(ge=1, description="first items of each task; null: all", extra={"unit": "items"})] | None
    ) = None
    num_fewshot: Annotated[int, Meta(ge=0, description="examples in the prompt; null: as the task says")] | None = (
        None
    )
    bos: Annotated[
        Literal["none", "bos"],
        Meta(description="bos: start every prompt with BOS, as lm-eval does for tokenizers that add one"),
    ] = "none"
    batch_size: Annotated[
        int, Meta(ge=1, description="sequences handed to the engine at once", extra={"unit": "sequences"})
    ] = 16
    max_length: Annotated[
        int, Meta(ge=2, description="longest model input; contexts are cut on the left", extra={"unit": "tokens"})
    ] = 1024

    def max_tokens(self) -> int:
        # The last token of a scored sequence is only a target, not an input.
        return self.max_length + 1

    def check(self, base: Path) -> None:
        if self.include_path is not None and not (base / self.include_path).is_dir():
            raise UserError(f"there is no folder {str(base / self.include_path)!r}", key="include_path")


def _build(options: LmEvalOptions, context: Any) -> Any:
    from infermix_lm_eval.evaluator import LmEvalEvaluator

    return LmEvalEvaluator(options, context)


def _needs(options: LmEvalOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"engine:score"})


@hookimpl
def infermix_evaluator() -> list[Component]:
    return [
        Component(
            name="lm_eval",
            role=Role.EVALUATOR,
            summary="tasks of lm-evaluation-harness, run through the cell's own engine",
            build=_build,
            options=LmEvalOptions,
            requires=("lm_eval",),
            extra="lm-eval",
            needs=_needs,
            source="https://github.com/EleutherAI/lm-evaluation-harness",
        )
    ]
