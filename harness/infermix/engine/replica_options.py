"""Options of engines that can run several times over, behind a router."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from infermix.roles.engine import EngineOptions


class ReplicaOptions(EngineOptions, frozen=True):
    """Several equal engines behind a router."""

    replicas: Annotated[
        int,
        Meta(
            ge=1,
            description="equal engines, each with KV and scheduler of its own: simulated ones have a machine each, "
            "native ones share device, weights, the memory for KV and that for swapped KV, and take turns",
            extra={"unit": "engines"},
        ),
    ] = 1
    router: Annotated[
        Literal["round_robin", "least_loaded", "prefix_affine"],
        Meta(
            description="who gets a request: one after the other; the one with the fewest requests; the one that was "
            "sent the longest beginning of the prompt before, unless it is too busy"
        ),
    ] = "round_robin"

    def __post_init__(self) -> None:
        if self.replicas == 1 and self.router != "round_robin":
            raise ValueError(f"router {self.router!r} has one engine to choose from; it needs replicas: 2 or more")
