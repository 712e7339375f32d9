"""Layouts for what a model keeps besides keys and values: MLA latents, states of recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from infermix.roles.component import Component, Features, Options, Role
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts


class LatentOptions(Options, frozen=True):
    block_size: Annotated[int, Meta(ge=1, le=4096, description="tokens in one block", extra={"unit": "tokens"})] = 16


class StateOptions(Options, frozen=True):
    block_size: Annotated[
        int, Meta(ge=1, le=4096, description="tokens in one block of the attention layers", extra={"unit": "tokens"})
    ] = 16
    snapshots: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="states kept beside the current one: so many tokens can be taken back (drafts of speculative "
            "decoding), at the price of as many more states per sequence",
            extra={"unit": "states"},
        ),
    ] = 0


def _latent_needs(options: LatentOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """An MLA model, and an attention backend for heads as wide as its compressed rows."""
    widths = {layer.latent_dim + layer.rope_dim for layer in model.layers if layer.latent_dim}
    return frozenset({"model:latent", *(f"head_dim:{width}" for width in widths)})


def _latent_provides(options: LatentOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    names = ("view:paged", "kv:paged", "kv:truncate", "kv:move", "kv:fork", "kv:export", "kv:swap", "kv:preallocated")
    return frozenset(names)


def _state_needs(options: StateOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"model:state"})


def _state_provides(options: StateOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    features = {"view:paged", "kv:paged", "kv:state", "kv:fork", "kv:swap", "kv:preallocated", "graph:no"}
    return frozenset(features | ({"kv:truncate"} if options.snapshots else set()))


def _gather(options: Any, model: ModelFacts, machine: MachineFacts) -> dict[str, str]:
    return {"view:dense": "gather"}


def _build_latent(options: LatentOptions, context: None) -> Any:
    from infermix_kv.latent import LatentLayout

    return LatentLayout(options.block_size)


def _build_state(options: StateOptions, context: None) -> Any:
    from infermix_kv.state import StateLayout

    return StateLayout(options.block_size, options.snapshots)


def model_components() -> list[Component]:
    return [
        Component(
            name="latent",
            role=Role.KV,
            summary="MLA models: the compressed row of each token in paged blocks, projections absorbed",
            build=_build_latent,
            options=LatentOptions,
            requires=("torch",),
            needs=_latent_needs,
            provides=_latent_provides,
            adapters=_gather,
        ),
        Component(
            name="state",
            role=Role.KV,
            summary="recurrent models and hybrids: states of constant size in slots, attention in paged blocks",
            build=_build_state,
            options=StateOptions,
            requires=("torch",),
            needs=_state_needs,
            provides=_state_provides,
            adapters=_gather,
        ),
    ]
