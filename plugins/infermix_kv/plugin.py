"""KV layouts that make the cache smaller, shared, or elsewhere."""

from __future__ import annotations

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component

from infermix_kv import quantized
from infermix_kv.dropping_components import dropping_components
from infermix_kv.model_components import model_components


@hookimpl
def infermix_kv() -> list[Component]:
    return [*dropping_components(), *quantized.COMPONENTS, *model_components()]
