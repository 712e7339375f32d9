"""vLLM as a whole engine."""

from __future__ import annotations

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component


@hookimpl
def infermix_engine() -> list[Component]:
    return []
