"""KV groups of a model, and what its cache takes."""

from __future__ import annotations

from collections.abc import Iterable

from infermix.roles.facts import ModelFacts
from infermix.roles.kv_space import KVGroup


def kv_groups(facts: ModelFacts) -> tuple[KVGroup, ...]:
    """Attention layers of equal (KV heads, key width, value width, window), in order of their first layer.

    Layers that read another layer's keys and values (`kv_from`) hold none of their own.
    """
    members: dict[tuple[int, int, int, int | None], list[int]] = {}
    for index, layer in enumerate(facts.layers):
        if layer.kind == "attention" and layer.kv_from is None:
            shape = (layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.window)
            members.setdefault(shape, []).append(index)
    return tuple(KVGroup(tuple(layers), *shape) for shape, layers in members.items())


def kv_bytes_per_token(facts: ModelFacts, element_bytes: float | None = None) -> float:
    """Bytes that one more token takes over all layers, windows not counted."""
    size = facts.dtype_bytes if element_bytes is None else element_bytes
    return sum(group.bytes_per_token(size) for group in kv_groups(facts))


def kv_bytes_read(groups: Iterable[KVGroup], context: int, element_bytes: float) -> float:
    """Bytes of K and V that attention over `context` tokens touches for one sequence, windows counted."""
    return sum(group.bytes_per_token(element_bytes) * min(context, group.window or context) for group in groups)
