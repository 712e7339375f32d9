"""Scheduling policies."""

from __future__ import annotations

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component


@hookimpl
def infermix_scheduler() -> list[Component]:
    return []
