"""The reference parts: plain PyTorch, the yardstick that every other part is tested against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, FeatureRule, Features, Options, Role
from infermix.toolkit.group_sizes import group_needs
from infermix.toolkit.skip import UNTOUCHED
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts


class PagedOptions(Options, frozen=True):
    block_size: Annotated[int, Meta(ge=1, le=4096, description="tokens in one block", extra={"unit": "tokens"})] = 16
    prefix_cache: Annotated[
        Literal["off", "hash", "radix"],
        Meta(
            description="serve the first tokens of prompts from earlier requests; hash: full blocks, by hash tables; "
            "radix: by a tree over tokens, which also copies the beginning of a block"
        ),
    ] = "off"
    keep_between_repeats: Annotated[
        bool, Meta(description="a repeat starts with the prefixes of the one before, not with an empty cache")
    ] = False

    def __post_init__(self) -> None:
        if self.keep_between_repeats and self.prefix_cache == "off":
            raise ValueError("keep_between_repeats needs a prefix_cache (hash or radix), which is off")


class RtnOptions(Options, frozen=True):
    bits: Annotated[Literal[8, 4, 3, 2], Meta(description="bits of a stored weight", extra={"unit": "bits"})] = 8
    granularity: Annotated[
        Literal["tensor", "channel", "group"],
        Meta(description="what shares a scale: the whole matrix, an output row, or group_size weights of a row"),
    ] = "group"
    group_size: Annotated[
        int,
        Meta(ge=2, description="weights that share a scale (granularity: group)", extra={"unit": "weights"}),
    ] = 64
    symmetric: Annotated[
        bool, Meta(description="scale only; false adds a zero point per scale and uses the range fully")
    ] = True
    skip: Annotated[
        tuple[str, ...],
        Meta(description="patterns (as in a shell) of module names that stay as they are"),
    ] = UNTOUCHED


class StaticOptions(Options, frozen=True):
    batch_size: Annotated[int, Meta(ge=1, description="requests that start together", extra={"unit": "requests"})] = 8


class ContinuousOptions(Options, frozen=True):
    max_num_seqs: Annotated[
        int, Meta(ge=1, description="most requests running at once", extra={"unit": "requests"})
    ] = 256
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, description="most tokens computed in one step", extra={"unit": "tokens"})
    ] = 2048
    chunked: Annotated[
        bool,
        Meta(
            description="split prompts over steps to stay inside max_num_batched_tokens; "
            "false: whole prompts, and a longer one runs in a step of its own beside the decodes"
        ),
    ] = False
    preemption: Annotated[
        Literal["recompute", "swap"],
        Meta(
            description="when KV runs out, the request admitted last gives it up: recompute computes it again later, "
            "swap moves it to host memory of limits.kv_swap_bytes and back (recompute where that is full)"
        ),
    ] = "recompute"


class CompileOptions(Options, frozen=True):
    mode: Annotated[
        Literal["default", "max-autotune-no-cudagraphs"],
        Meta(description="how long inductor searches; the engine captures CUDA graphs itself"),
    ] = "default"
    dynamic: Annotated[
        bool,
        Meta(
            description="one version for any number of tokens; false compiles each number anew, also inside a "
            "measured repeat, whose setup_in_window guard then turns red"
        ),
    ] = True
    backend: Annotated[
        Literal["inductor", "aot_eager", "eager"],
        Meta(description="inductor generates code (on a CPU it needs a C++ compiler); the others only trace"),
    ] = "inductor"


def _always(*names: str) -> FeatureRule:
    features = frozenset(names)

    def rule(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
        return features

    return rule


def _swap_needs(options: ContinuousOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"kv:swap", "limits:kv_swap_bytes"} if options.preemption == "swap" else ())


PAGED_FEATURES = frozenset(
    {"view:paged", "kv:paged", "kv:truncate", "kv:move", "kv:fork", "kv:export", "kv:swap", "kv:preallocated"}
    | {"graph:mixed"}
)


def _paged_provides(options: PagedOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return PAGED_FEATURES if options.prefix_cache == "off" else PAGED_FEATURES | {"kv:prefix"}


def _gather(options: Any, model: ModelFacts, machine: MachineFacts) -> dict[str, str]:
    return {"view:dense": "gather"}


def _build_eager(options: Options, context: None) -> Any:
    from infermix_reference.attention_eager import EagerAttention

    return EagerAttention()


def _build_sdpa(options: Options, context: None) -> Any:
    from infermix_reference.attention_sdpa import SdpaAttention

    return SdpaAttention()


def _build_no_kv(options: Options, context: None) -> Any:
    from infermix_reference.kv_none import RecomputeLayout

    return RecomputeLayout()


def _build_concat(options: Options, context: None) -> Any:
    from infermix_reference.kv_concat import ConcatLayout

    return ConcatLayout()


def _build_dense(options: Options, context: None) -> Any:
    from infermix_reference.kv_dense import DenseLayout

    return DenseLayout()


def _build_paged(options: PagedOptions, context: None) -> Any:
    from infermix_reference.kv_paged import PagedLayout

    return PagedLayout(options.block_size, options.prefix_cache, keep_between_repeats=options.keep_between_repeats)


def _build_unquantized(options: Options, context: None) -> Any:
    from infermix_reference.quantizer_none import NoQuantizer

    return NoQuantizer()


def _build_rtn(options: RtnOptions, context: None) -> Any:
    from infermix_reference.quantizer_rtn import RtnQuantizer

    return RtnQuantizer(
        bits=options.bits,
        granularity=options.granularity,
        group_size=options.group_size,
        symmetric=options.symmetric,
        skip=options.skip,
    )


def _rtn_needs(options: RtnOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """Groups must divide every row. With patterns of one's own the layers are known at load only."""
    known = options.granularity == "group" and options.skip == RtnOptions().skip
    return group_needs(model, options.group_size) if known else frozenset()


def _rtn_weight_bits(options: RtnOptions) -> float:
    """Scales and zero points of wider granularities depend on the layer and stay below 0.05 bits."""
    if options.granularity != "group":
        return float(options.bits)
    return options.bits + (16 if options.symmetric else 24) / options.group_size


def _build_autoregressive(options: Options, context: None) -> Any:
    from infermix_reference.decoder import AutoregressiveDecoder

    return AutoregressiveDecoder()


def _swap_provides(options: ContinuousOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"scheduler:swap"} if options.preemption == "swap" else ())


def _build_static(options: StaticOptions, context: int) -> Any:
    from infermix_reference.scheduler_static import StaticScheduler

    return StaticScheduler(batch_size=min(options.batch_size, context))


def _build_continuous(options: ContinuousOptions, context: int) -> Any:
    from infermix_reference.scheduler_continuous import ContinuousScheduler

    return ContinuousScheduler(
        max_num_seqs=min(options.max_num_seqs, context),
        max_num_batched_tokens=options.max_num_batched_tokens,
        chunked=options.chunked,
        swap=options.preemption == "swap",
    )


def _build_compile(options: CompileOptions, context: None) -> Any:
    from infermix_reference.transform_compile import CompileTransform

    return CompileTransform(options)


@hookimpl
def infermix_attention() -> list[Component]:
    reads = _always("view:dense|view:ragged")
    return [
        Component(
            name="eager",
            role=Role.ATTENTION,
            summary="matmul, softmax, matmul in fp32: the yardstick",
            build=_build_eager,
            requires=("torch",),
            needs=reads,
            provides=_always(
                "attn:sliding_window", "attn:softcap", "attn:sinks", "attn:tree_mask", "attn:noncausal", "head_dim:*"
            ),
        ),
        Component(
            name="sdpa",
            role=Role.ATTENTION,
            summary="PyTorch's scaled_dot_product_attention",
            build=_build_sdpa,
            requires=("torch",),
            needs=reads,
            provides=_always("attn:sliding_window", "attn:sinks", "attn:tree_mask", "attn:noncausal", "head_dim:*"),
        ),
    ]


@hookimpl
def infermix_kv() -> list[Component]:
    return [
        Component(
            name="none",
            role=Role.KV,
            summary="keeps nothing and computes the whole sequence in every step",
            build=_build_no_kv,
            requires=("torch",),
            provides=_always("view:ragged", "kv:truncate", "kv:fork", "kv:recompute", "graph:no"),
        ),
        Component(
            name="concat",
            role=Role.KV,
            summary="one tensor per sequence that grows by concatenation",
            build=_build_concat,
            requires=("torch",),
            provides=_always("view:ragged", "kv:truncate", "kv:move", "kv:fork", "kv:export", "graph:no"),
        ),
        Component(
            name="dense",
            role=Role.KV,
            summary="one row of the longest length per sequence, allocated in advance",
            build=_build_dense,
            requires=("torch",),
            provides=_always(
                "view:dense", "kv:truncate", "kv:move", "kv:fork", "kv:export", "kv:swap", "kv:preallocated"
            ),
        ),
        Component(
            name="paged",
            role=Role.KV,
            summary="blocks from one pool with reference counts, prefix caching if asked for",
            build=_build_paged,
            options=PagedOptions,
            requires=("torch",),
            provides=_paged_provides,
            adapters=_gather,
        ),
    ]


@hookimpl
def infermix_quantizer() -> list[Component]:
    return [
        Component(
            name="none",
            role=Role.QUANTIZER,
            summary="weights as the model has them",
            build=_build_unquantized,
        ),
        Component(
            name="rtn",
            needs=_rtn_needs,
            role=Role.QUANTIZER,
            summary="round to nearest, 8, 4, 3 or 2 bits, dequantized in every forward",
            build=_build_rtn,
            options=RtnOptions,
            requires=("torch",),
            lossless=lambda options: False,
            weight_bits=_rtn_weight_bits,
        ),
    ]


@hookimpl
def infermix_decoder() -> list[Component]:
    return [
        Component(
            name="autoregressive",
            role=Role.DECODER,
            summary="one forward per token",
            build=_build_autoregressive,
            requires=("torch",),
            provides=lambda options, model, machine: frozenset({"decoder:plain"}),
        )
    ]


@hookimpl
def infermix_scheduler() -> list[Component]:
    return [
        Component(
            name="static",
            role=Role.SCHEDULER,
            summary="a batch starts together, and the next one when all of it has ended",
            build=_build_static,
            options=StaticOptions,
        ),
        Component(
            name="continuous",
            role=Role.SCHEDULER,
            summary="requests join and leave at every step",
            build=_build_continuous,
            options=ContinuousOptions,
            needs=_swap_needs,
            provides=_swap_provides,
        ),
    ]


@hookimpl
def infermix_transform() -> list[Component]:
    return [
        Component(
            name="compile",
            role=Role.TRANSFORM,
            summary="torch.compile of every decoder layer, attention and KV store left as they are",
            build=_build_compile,
            options=CompileOptions,
            requires=("torch",),
        )
    ]
