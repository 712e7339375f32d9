"""The native engine as a component: options and features, no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from infermix.engine.replica_options import ReplicaOptions
from infermix.roles.component import PART_ROLES, Component, Role


class NativeOptions(ReplicaOptions, frozen=True):
    """How the native engine drives the model."""

    graphs: Annotated[
        Literal["auto", "off"],
        Meta(description="replay decode steps from CUDA graphs: auto on a GPU when every part can be captured"),
    ] = "auto"
    mixed_graph_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=16384)] | None,
        Meta(
            description="largest prefill or mixed step that is replayed from a CUDA graph, 0 for none; default: as "
            "far as launching it takes the host longer than the device",
            extra={"unit": "tokens"},
        ),
    ] = None
    tune: Annotated[
        Literal["auto", "off"],
        Meta(
            description="auto: on a GPU, measure launch parameters of kernels for this model in set-up, once "
            "per machine (minutes); off: those that were measured before, else the kernels' defaults"
        ),
    ] = "off"
    self_check: Annotated[
        bool,
        Meta(description="compare packed logits with the model's own full forward before anything is timed"),
    ] = True
    overlap: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="read the tokens of a step while the next one runs, so that host work overlaps device work: "
            "auto on a GPU"
        ),
    ] = "auto"
    linears: Annotated[
        Literal["torch", "packed"],
        Meta(description="CPU products: torch's, or weights packed once for oneDNN (private torch API)"),
    ] = "torch"
    step_log: Annotated[
        bool, Meta(description="keep what each step computed and how long it took in the record, to calibrate from")
    ] = False
    max_num_seqs: Annotated[
        int | None,
        Meta(
            description="lanes; default: what the scheduler and the workload can use",
            extra={"unit": "sequences"},
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_log and self.replicas > 1:
            raise ValueError("step_log: true takes one engine, not several replicas")


def _build(options: NativeOptions, context: Any) -> Any:
    from infermix.engine.assembly import assemble

    return assemble(options, context)


COMPONENTS = (
    Component(
        name="native",
        role=Role.ENGINE,
        summary="the five parts around transformers' own modeling code, packed sequences, CUDA graphs for decode",
        build=_build,
        options=NativeOptions,
        provides=lambda options, model, machine: frozenset(
            {"engine:score", "engine:score_decode", "engine:logits", "engine:parts", "engine:outputs"}
        ),
        hosts=frozenset((*PART_ROLES, Role.TRANSFORM)),
    ),
)
