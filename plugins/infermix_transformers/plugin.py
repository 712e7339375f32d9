"""Plain `transformers` as a whole engine: options and features, no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Options, Role
from infermix.roles.facts import MachineFacts, ModelFacts
from msgspec import Meta


class TransformersOptions(Options, frozen=True, kw_only=True):
    """How `model.generate()` is called."""

    batch_size: Annotated[
        int, Meta(ge=1, description="waiting requests that one generate() call takes", extra={"unit": "sequences"})
    ] = 8
    attn_implementation: Annotated[
        Literal["sdpa", "eager"], Meta(description="transformers' own attention function")
    ] = "sdpa"
    cache: Annotated[
        Literal["dynamic", "static"], Meta(description="cache class of generate(): grows, or allocated per call")
    ] = "dynamic"
    compile: Annotated[
        bool, Meta(description="let generate() compile its decode step (static cache on a GPU only)")
    ] = False

    def __post_init__(self) -> None:
        if self.compile and self.cache != "static":
            raise ValueError("compile: true needs cache: static (generate() compiles for static caches only)")


def _build(options: TransformersOptions, context: Any) -> Any:
    from infermix_transformers.engine import build_engine

    return build_engine(options, context)


def _needs(options: TransformersOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"device:cuda"}) if options.compile else frozenset()


def _provides(options: TransformersOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"engine:score", "engine:score_decode", "engine:logits", "engine:grows_memory"})


@hookimpl
def infermix_engine() -> list[Component]:
    return [
        Component(
            name="transformers",
            role=Role.ENGINE,
            summary="model.generate() on left-padded static batches; hosts the quantizer only",
            build=_build,
            options=TransformersOptions,
            requires=("transformers",),
            needs=_needs,
            provides=_provides,
            hosts=frozenset({Role.QUANTIZER}),
            source="https://github.com/huggingface/transformers",
        )
    ]
