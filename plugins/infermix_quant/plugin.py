"""Quantization algorithms in plain PyTorch."""

from __future__ import annotations

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component


@hookimpl
def infermix_quantizer() -> list[Component]:
    return []
