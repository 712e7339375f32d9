"""vLLM as a whole engine: options and features, no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Options, Role
from infermix.roles.facts import MachineFacts, ModelFacts
from msgspec import Meta

_EIGHT_BITS = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only")


class VllmOptions(Options, frozen=True, kw_only=True):
    """What vLLM is started with; `null` leaves a choice to vLLM, and the record says what it chose."""

    max_num_seqs: (
        Annotated[
            int,
            Meta(ge=1, description="requests in one step; null: what the cell needs", extra={"unit": "sequences"}),
        ]
        | None
    ) = None
    max_num_batched_tokens: (
        Annotated[
            int,
            Meta(ge=1, description="new tokens in one step; prompts are chunked", extra={"unit": "tokens"}),
        ]
        | None
    ) = None
    enforce_eager: Annotated[bool, Meta(description="no torch.compile and no CUDA graphs")] = False
    attention_backend: (
        Annotated[str, Meta(description="vLLM's name: FLASH_ATTN, TRITON_ATTN, FLEX_ATTENTION, ...")] | None
    ) = None
    block_size: (
        Annotated[int, Meta(ge=1, description="block of the paged KV cache", extra={"unit": "tokens"})] | None
    ) = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"],
        Meta(description="storage of K and V; auto: the model's dtype, everything else is lossy"),
    ] = "auto"
    quantization: (
        Annotated[
            Literal["fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only"],
            Meta(description="quantize the linears while loading; null: the weights as they are"),
        ]
        | None
    ) = None
    prefix_caching: Annotated[
        bool, Meta(description="serve common prompt prefixes from the cache (vLLM's own default is true)")
    ] = False
    async_scheduling: (
        Annotated[bool, Meta(description="schedule the next step while this one runs on the device")] | None
    ) = None
    log_stats: Annotated[
        bool, Meta(description="vLLM's own statistics: counts preemptions, and costs host time in every step")
    ] = False


def _build(options: VllmOptions, context: Any) -> Any:
    from infermix_vllm.build import build_engine

    return build_engine(options, context)


def _needs(options: VllmOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"device:cuda", "dtype:bfloat16|dtype:float16|dtype:float32"})


def _provides(options: VllmOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """No logits and no forced decoding: vLLM gives log-probabilities of a prompt, from one pass."""
    return frozenset({"engine:score", "engine:fills_memory"})


def _weight_bits(options: VllmOptions) -> float | None:
    return 8.0 if options.quantization in _EIGHT_BITS else None


@hookimpl
def infermix_engine() -> list[Component]:
    return [
        Component(
            name="vllm",
            role=Role.ENGINE,
            summary="vLLM in this process, token ids in and out; its own scheduler, paged KV and CUDA graphs",
            build=_build,
            options=VllmOptions,
            requires=("vllm",),
            needs=_needs,
            provides=_provides,
            lossless=lambda options: options.quantization is None and options.kv_cache_dtype == "auto",
            weight_bits=_weight_bits,
            source="https://github.com/vllm-project/vllm",
        )
    ]
