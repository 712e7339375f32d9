"""What an outsider registers: a scheduler that starts the shortest waiting prompt first."""

from __future__ import annotations

from typing import Annotated, Any

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Options, Role
from msgspec import Meta


class ShortestOptions(Options, frozen=True):
    max_num_seqs: Annotated[
        int, Meta(ge=1, description="most requests running at once", extra={"unit": "requests"})
    ] = 8


def _build(options: ShortestOptions, max_num_seqs: int) -> Any:
    from infermix_example_scheduler import ShortestPromptScheduler

    return ShortestPromptScheduler(min(options.max_num_seqs, max_num_seqs))


@hookimpl
def infermix_scheduler() -> list[Component]:
    return [
        Component(
            name="shortest_prompt",
            role=Role.SCHEDULER,
            summary="the shortest waiting prompt starts first",
            build=_build,
            options=ShortestOptions,
        )
    ]
