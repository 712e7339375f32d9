"""The simulated engine as a component: options and features, no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from infermix.engine.replica_options import ReplicaOptions
from infermix.errors import UserError
from infermix.roles.component import PART_ROLES, Component, Features, Role
from infermix.roles.facts import Ceilings, MachineFacts, ModelFacts

#: Feature of an engine whose time is virtual: its records are marked, and never share a table with measured ones.
SIMULATED = "engine:simulated"
#: Feature of an engine that tells the first and the last token of a request, not when those between came.
NO_TOKEN_TIMES = "engine:no_token_times"


class SimulatedOptions(ReplicaOptions, frozen=True):
    """How long steps take, and what is told of them."""

    calibration: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="file of `infermix calibrate`, relative to the experiment; null: the roofline of this "
                "machine's measured ceilings over `efficiency`",
            ),
        ]
        | None
    ) = None
    bytes_per_s: (
        Annotated[
            float,
            Meta(
                ge=1,
                description="without a calibration: bandwidth of a device that is not here; null: this machine's",
                extra={"unit": "bytes/s"},
            ),
        ]
        | None
    ) = None
    flops_per_s: (
        Annotated[float, Meta(ge=1, description="likewise, its products", extra={"unit": "FLOP/s"})] | None
    ) = None
    memory_bytes: (
        Annotated[
            int, Meta(ge=1, description="likewise, memory for weights and KV of one replica", extra={"unit": "bytes"})
        ]
        | None
    ) = None
    efficiency: Annotated[
        float, Meta(ge=1e-6, le=1, description="without a calibration: share of the roofline that steps reach")
    ] = 0.6
    overhead_s: Annotated[
        float,
        Meta(ge=0, le=1e6, description="without a calibration: what every step takes besides", extra={"unit": "s"}),
    ] = 0.0005
    detail: Annotated[
        Literal["requests", "tokens"],
        Meta(
            description="requests: first and last token of each, times between tokens as a histogram; tokens: the "
            "time of every token, for short runs and limits on itl_s"
        ),
    ] = "requests"
    jump: Annotated[
        bool, Meta(description="run a plan that stays valid to the next event instead of asking at every step")
    ] = True

    def check(self, base: Path) -> None:
        """Raises `UserError` for a calibration that cannot be read."""
        if self.calibration is not None:
            from infermix.cost.calibration_file import read_step_times

            try:
                read_step_times(base / self.calibration)
            except UserError as error:
                raise UserError(error.message, where=error.where, key="calibration", hint=error.hint) from None

    def machine(self, here: MachineFacts, dtype: str, base: Path) -> MachineFacts:
        """The calibrated machine, or this one with what the options say of another."""
        if self.calibration is not None:
            from infermix.cost.calibration_file import facts_of_machine, read_step_times

            return facts_of_machine(read_step_times(base / self.calibration).conditions.machine)
        ceilings = Ceilings(
            self.bytes_per_s or here.ceilings.copy_bytes_per_s,
            {dtype: self.flops_per_s} if self.flops_per_s else here.ceilings.matmul_flops_per_s,
        )
        device = here.device if self.memory_bytes is None else "cuda"
        return replace(here, device=device, memory_bytes=self.memory_bytes or here.memory_bytes, ceilings=ceilings)


def _build(options: SimulatedOptions, context: Any) -> Any:
    from infermix.engine.simulated.build import build_engine

    return build_engine(options, context)


def _provides(options: SimulatedOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    untimed = {NO_TOKEN_TIMES} if options.detail == "requests" else set()
    return frozenset({SIMULATED, "engine:parts", *untimed})


COMPONENTS = (
    Component(
        name="simulated",
        role=Role.ENGINE,
        summary="scheduler, KV space and metrics on a virtual clock, steps as long as a model of them says",
        build=_build,
        options=SimulatedOptions,
        needs=lambda options, model, machine: frozenset({"decoder:plain"}),
        provides=_provides,
        hosts=frozenset((*PART_ROLES, Role.TRANSFORM)),
    ),
)
