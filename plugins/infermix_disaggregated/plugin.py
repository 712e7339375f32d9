"""The disaggregated engine as a component: options and features, no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from infermix.engine.components import NativeOptions
from infermix.hookspecs import hookimpl
from infermix.roles.component import PART_ROLES, Component, Role
from msgspec import Meta


class DisaggregatedOptions(NativeOptions, frozen=True):
    """Those of the native engine, for both workers, and how KV gets from one to the other."""

    handover: Annotated[
        Literal["auto", "host", "device"],
        Meta(
            description="host: through shared host memory; device: KV stays on the GPU, whose memory both open (CUDA "
            "IPC), or the cell is refused; auto: device where a pattern comes through, else host, with the reason"
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.replicas > 1:
            raise ValueError("replicas: one worker for prompts and one for outputs, not several")
        if self.step_log:
            raise ValueError("step_log: true takes the native engine")


def _build(options: DisaggregatedOptions, context: Any) -> Any:
    from infermix_disaggregated.build import build_engine

    return build_engine(options, context)


@hookimpl
def infermix_engine() -> list[Component]:
    return [
        Component(
            name="disaggregated",
            role=Role.ENGINE,
            summary="prompts in one process, outputs in another (native engines), KV handed over between them",
            build=_build,
            options=DisaggregatedOptions,
            needs=lambda options, model, machine: frozenset({"kv:swap", "kv:export"}),
            provides=lambda options, model, machine: frozenset(
                {"engine:score", "engine:score_decode", "engine:logits", "engine:parts", "engine:hands_over"}
            ),
            hosts=frozenset((*PART_ROLES, Role.TRANSFORM)),
        )
    ]
