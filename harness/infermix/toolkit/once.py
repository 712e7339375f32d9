"""What is computed once per forward and shared between its layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from infermix.roles.batch import Batch

T = TypeVar("T")


def once_per_forward(batch: Batch, layer_idx: int, key: Hashable, make: Callable[[], T]) -> T:
    """The value of `make()`, computed by the first layer that asks for `key` in each forward.

    Layers run in increasing order, so a layer that asks at or before the one that made the value begins a new
    forward: a persistent `Batch` never serves a value of an earlier step, and a graph records the computation.
    """
    made = batch.extra.get(key)
    if made is not None and made[0] < layer_idx:
        return made[1]
    value = make()
    batch.extra[key] = (layer_idx, value)
    return value
