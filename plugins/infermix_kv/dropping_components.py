"""Components that keep less than every token: rings for sliding windows, sinks and window, eviction by score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from infermix.roles.component import Component, FeatureRule, Features, Options, Role
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts

RING_FEATURES = ("view:paged", "kv:paged", "kv:truncate", "kv:fork", "kv:preallocated")

BlockSize = Annotated[int, Meta(ge=1, le=4096, description="tokens in one block", extra={"unit": "tokens"})]
ChunkTokens = Annotated[
    int,
    Meta(
        ge=1,
        description="most new tokens of one sequence in one forward; longer prompts run in pieces of this length, "
        "whatever the scheduler says, so that a ring holds its window and one piece",
        extra={"unit": "tokens"},
    ),
]


class HybridOptions(Options, frozen=True):
    block_size: BlockSize = 16
    max_chunk_tokens: ChunkTokens = 512


def _always(*names: str) -> FeatureRule:
    features = frozenset(names)

    def rule(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
        return features

    return rule


def _gather(options: Any, model: ModelFacts, machine: MachineFacts) -> dict[str, str]:
    return {"view:dense": "gather"}


def _build_hybrid(options: HybridOptions, context: None) -> Any:
    from infermix_kv.hybrid import HybridLayout

    return HybridLayout(options.block_size, options.max_chunk_tokens)


def _build_windowed(options: HybridOptions, context: None) -> Any:
    from infermix_kv.hybrid import HybridLayout

    return HybridLayout(options.block_size, options.max_chunk_tokens, windows_only=True)


def dropping_components() -> list[Component]:
    return [
        Component(
            name="hybrid",
            role=Role.KV,
            summary="each layer as its config asks: a ring of blocks for sliding windows, paged for full attention",
            build=_build_hybrid,
            options=HybridOptions,
            requires=("torch",),
            provides=_always(*RING_FEATURES),
            adapters=_gather,
        ),
        Component(
            name="windowed",
            role=Role.KV,
            summary="rings of blocks alone, memory constant in the context; every layer must have a window",
            build=_build_windowed,
            options=HybridOptions,
            requires=("torch",),
            provides=_always(*RING_FEATURES, "kv:windows_only"),
            adapters=_gather,
        ),
    ]
