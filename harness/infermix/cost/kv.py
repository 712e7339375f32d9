"""KV groups of a model, and what its cache takes."""

from __future__ import annotations

from collections.abc import Iterable

from infermix.roles.facts import ModelFacts
from infermix.roles.kv_space import KVGroup, KVLayout, LayerState


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


def latent_groups(facts: ModelFacts) -> tuple[KVGroup, ...]:
    """What MLA layers can keep instead: one row of latent and rotary key per token, the value inside it.

    Empty when a layer that attends is no MLA layer.
    """
    layers = [(index, layer) for index, layer in enumerate(facts.layers) if layer.kind == "attention"]
    if not all(layer.latent_dim for _, layer in layers):
        return ()
    members: dict[tuple[int, int, int | None], list[int]] = {}
    for index, layer in layers:
        shape = (layer.latent_dim + layer.rope_dim, layer.latent_dim, layer.window)
        members.setdefault(shape, []).append(index)
    return tuple(
        KVGroup(tuple(rows), 1, width, latent, window, shared_values=True)
        for (width, latent, window), rows in members.items()
    )


def stored_groups(facts: ModelFacts, layout: KVLayout) -> tuple[KVGroup, ...]:
    """What `layout` keeps of this model, by its `form`; a model without latents has keys and values to keep."""
    latents = latent_groups(facts) if getattr(layout, "form", "expanded") == "latent" else ()
    return latents or kv_groups(facts)


def layer_states(facts: ModelFacts) -> tuple[LayerState, ...]:
    """What recurrent layers keep per sequence."""
    return tuple(LayerState(index, layer.states) for index, layer in enumerate(facts.layers) if layer.states)


def state_bytes_per_seq(facts: ModelFacts) -> int:
    """Bytes of one sequence's recurrent states over all layers, whatever its length."""
    return sum(state.bytes(facts.dtype_bytes) for state in layer_states(facts))


def kv_bytes_per_token(facts: ModelFacts, element_bytes: float | None = None) -> float:
    """Bytes that one more token takes over all layers, windows not counted."""
    size = facts.dtype_bytes if element_bytes is None else element_bytes
    return sum(group.bytes_per_token(size) for group in kv_groups(facts))


def kv_bytes_read(groups: Iterable[KVGroup], context: int, element_bytes: float) -> float:
    """Bytes of K and V that attention over `context` tokens touches for one sequence, windows counted."""
    return sum(group.bytes_per_token(element_bytes) * min(context, group.window or context) for group in groups)


def kv_bytes_read_again(facts: ModelFacts, context: int, element_bytes: float) -> float:
    """The same for layers that read what another layer stored (`LayerFacts.kv_from`): nothing kept, but moved."""
    shared = (layer for layer in facts.layers if layer.kind == "attention" and layer.kv_from is not None)
    groups = (KVGroup((0,), layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.window) for layer in shared)
    return kv_bytes_read(groups, context, element_bytes)
