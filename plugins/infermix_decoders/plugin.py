"""Decoders that gain more than one token per forward pass."""

from __future__ import annotations

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component


@hookimpl
def infermix_decoder() -> list[Component]:
    return []
