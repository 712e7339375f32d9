"""Components that keep less than every token: rings for sliding windows, sinks and window, eviction by score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from infermix.roles.component import Component, FeatureRule, Features, Options, Role
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts

_SCORED = ("view:paged", "kv:paged", "kv:truncate", "kv:fork", "kv:swap")
RING_FEATURES = ("view:paged", "kv:paged", "kv:truncate", "kv:fork", "kv:swap", "kv:preallocated")

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


class SinkWindowOptions(Options, frozen=True):
    sink_tokens: Annotated[
        int,
        Meta(ge=0, description="first tokens that stay, rounded up to whole blocks", extra={"unit": "tokens"}),
    ] = 4
    window: Annotated[
        int,
        Meta(
            ge=1,
            description="last tokens that stay, the query's own included; up to a block and the step's tokens more",
            extra={"unit": "tokens"},
        ),
    ] = 1024
    block_size: BlockSize = 16
    max_chunk_tokens: ChunkTokens = 512


Budget = Annotated[
    int, Meta(ge=1, description="tokens of a sequence that stay when it is cut", extra={"unit": "tokens"})
]


class H2oOptions(Options, frozen=True):
    budget: Budget = 1024
    recent_fraction: Annotated[
        float, Meta(ge=0, le=1, description="share of the budget that the newest tokens get; the rest: heavy hitters")
    ] = 0.5
    slack: Annotated[
        int,
        Meta(ge=0, description="tokens beyond the budget before the cache is cut again", extra={"unit": "tokens"}),
    ] = 16
    block_size: BlockSize = 16


class SnapKvOptions(Options, frozen=True):
    budget: Budget = 1024
    observation_window: Annotated[
        int,
        Meta(
            ge=1,
            description="last queries of a prompt whose attention chooses; as many of the newest tokens stay. "
            "A piece of a prompt that is shorter is not looked at",
            extra={"unit": "tokens"},
        ),
    ] = 32
    pool_kernel: Annotated[
        int, Meta(ge=1, description="neighbours whose highest score a token takes; odd", extra={"unit": "tokens"})
    ] = 5
    block_size: BlockSize = 16

    def __post_init__(self) -> None:
        if self.budget < self.observation_window:
            raise ValueError(
                f"budget {self.budget} does not hold the last observation_window {self.observation_window} tokens, "
                "which all stay"
            )
        if self.pool_kernel % 2 == 0:
            raise ValueError(f"pool_kernel {self.pool_kernel} is even, so it has no middle: use an odd number")


def _always(*names: str) -> FeatureRule:
    features = frozenset(names)

    def rule(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
        return features

    return rule


def _snapkv_provides(options: SnapKvOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """Decode steps bring one or two tokens: a window that long is observed, and the cache cut, in every step."""
    return frozenset({*_SCORED, *(("kv:drops_decoding",) if options.observation_window <= 2 else ())})


def _gather(options: Any, model: ModelFacts, machine: MachineFacts) -> dict[str, str]:
    return {"view:dense": "gather"}


def _build_hybrid(options: HybridOptions, context: None) -> Any:
    from infermix_kv.hybrid import HybridLayout

    return HybridLayout(options.block_size, options.max_chunk_tokens)


def _build_windowed(options: HybridOptions, context: None) -> Any:
    from infermix_kv.hybrid import HybridLayout

    return HybridLayout(options.block_size, options.max_chunk_tokens, windows_only=True)


def _build_sink_window(options: SinkWindowOptions, context: None) -> Any:
    from infermix_kv.sink_window import SinkWindowLayout

    return SinkWindowLayout(options.block_size, options.sink_tokens, options.window, options.max_chunk_tokens)


def _build_h2o(options: H2oOptions, context: None) -> Any:
    from infermix_kv.eviction import EvictingLayout, Policy

    recent = round(options.budget * options.recent_fraction)
    return EvictingLayout(options.block_size, Policy(budget=options.budget, recent=recent, slack=options.slack))


def _build_snapkv(options: SnapKvOptions, context: None) -> Any:
    from infermix_kv.eviction import EvictingLayout, Policy

    window = options.observation_window
    policy = Policy(budget=options.budget, recent=window, observed_queries=window, pool_kernel=options.pool_kernel)
    return EvictingLayout(options.block_size, policy)


def dropping_components() -> list[Component]:
    return [*_rings(), *_cuts()]


def _rings() -> list[Component]:
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


def _cuts() -> list[Component]:
    return [
        Component(
            name="sink_window",
            role=Role.KV,
            summary="the first tokens and a window of the last ones in constant memory, keys at their true positions",
            build=_build_sink_window,
            options=SinkWindowOptions,
            requires=("torch",),
            provides=_always(*RING_FEATURES),
            adapters=_gather,
            lossless=lambda options: False,
            source="Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023",
        ),
        Component(
            name="h2o",
            role=Role.KV,
            summary="per head the newest tokens and those with the highest sums of attention, within a budget",
            build=_build_h2o,
            options=H2oOptions,
            requires=("torch",),
            provides=_always(*_SCORED, "kv:drops_decoding", "graph:no"),
            adapters=_gather,
            lossless=lambda options: False,
            source="Zhang et al., H2O: Heavy-Hitter Oracle, 2023",
        ),
        Component(
            name="snapkv",
            role=Role.KV,
            summary="per head the tokens of a prompt that its last queries attend to most; generated ones all stay",
            build=_build_snapkv,
            options=SnapKvOptions,
            requires=("torch",),
            provides=_snapkv_provides,
            adapters=_gather,
            lossless=lambda options: False,
            source="Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, 2024",
        ),
    ]
