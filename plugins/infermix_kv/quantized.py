"""What this package registers for quantized KV: options and rules only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from infermix.roles.component import Component, FeatureRule, Features, Options, Role
from infermix.roles.kv_grouped import fills_words
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts

#: The first NVIDIA GPUs that convert to and from fp8 in hardware.
_FP8_CAPABILITY = 89
#: Root mean square error over that of normal numbers, heads of up to 256: the largest magnitude of a head is about
#: three deviations, so an int8 step is 0.024 of one, and a step's error is a twelfth of it squared; fp8 keeps three
#: bits behind the leading one.
_ROW_ERRORS = {"int8": 0.01, "fp8": 0.04}


class QuantizedOptions(Options, frozen=True):
    dtype: Annotated[
        Literal["int8", "fp8"],
        Meta(description="of stored keys and values; a fp32 scale per token and head beside it"),
    ] = "int8"
    block_size: Annotated[int, Meta(ge=1, le=4096, description="tokens in one block", extra={"unit": "tokens"})] = 16


class KiviOptions(Options, frozen=True):
    bits: Annotated[Literal[4, 2], Meta(description="bits of a stored number", extra={"unit": "bits"})] = 4
    group_size: Annotated[
        int,
        Meta(ge=2, description="tokens of a key channel, and channels of a value, that share scale and zero point"),
    ] = 32
    residual_length: Annotated[
        int,
        Meta(
            ge=4,
            description="capacity of the full-precision tail; all but its last two groups stay in full precision",
            extra={"unit": "tokens"},
        ),
    ] = 128
    block_size: Annotated[
        int, Meta(ge=2, le=4096, description="tokens in one block, whole groups", extra={"unit": "tokens"})
    ] = 32

    def __post_init__(self) -> None:
        if self.block_size % self.group_size:
            raise ValueError(f"block_size {self.block_size} is not a multiple of group_size {self.group_size}")
        if self.residual_length < 2 * self.group_size:
            raise ValueError(
                f"residual_length {self.residual_length} is too small: two groups of group_size {self.group_size} "
                f"are {2 * self.group_size} tokens"
            )


def _always(*names: str) -> FeatureRule:
    features = frozenset(names)
    return lambda options, model, machine: features


def _quantized_needs(options: QuantizedOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """A GPU without fp8 is refused by asking for the first one that has it."""
    capability = machine.compute_capability
    old = capability is not None and capability < _FP8_CAPABILITY
    return frozenset({f"sm:{_FP8_CAPABILITY}"} if options.dtype == "fp8" and old else ())


def _gather(options: Any, model: ModelFacts, machine: MachineFacts) -> dict[str, str]:
    return {"view:dense": "gather"}


def _kivi_provides(options: KiviOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """Read in place where groups and heads are whole words, else through the gather alone."""
    dims = {dim for layer in model.layers if layer.kind == "attention" for dim in (layer.key_dim, layer.value_dim)}
    features = frozenset({"kv:truncate", "kv:fork", "kv:swap", "kv:preallocated"})
    return features | ({"view:kivi"} if fills_words(options.bits, options.group_size, *dims) else set())


def _kivi_error(options: KiviOptions) -> float:
    """n normal numbers span less than 2 sqrt(2 ln n) deviations; an error is step / sqrt(12)."""
    span = 2 * math.sqrt(2 * math.log(options.group_size))
    return span / (2**options.bits - 1) / math.sqrt(12)


def _build_quantized(options: QuantizedOptions, context: None) -> Any:
    from infermix_kv.kv_quantized import QuantizedLayout

    return QuantizedLayout(options.dtype, options.block_size)


def _build_kivi(options: KiviOptions, context: None) -> Any:
    from infermix_kv.kv_kivi import KiviLayout

    return KiviLayout(options.bits, options.group_size, options.residual_length, options.block_size)


COMPONENTS = (
    Component(
        name="quantized",
        role=Role.KV,
        summary="blocks of int8 or fp8, a scale per token and head",
        build=_build_quantized,
        options=QuantizedOptions,
        requires=("torch",),
        needs=_quantized_needs,
        provides=_always(
            "view:quantized",
            "kv:truncate",
            "kv:move",
            "kv:fork",
            "kv:export",
            "kv:swap",
            "kv:preallocated",
            "graph:mixed",
        ),
        adapters=_gather,
        lossless=lambda options: False,
        kv_error=lambda options: _ROW_ERRORS[options.dtype],
    ),
    Component(
        name="kivi",
        role=Role.KV,
        summary="4 or 2 bits, keys per channel, values per token, recent tokens in full precision",
        build=_build_kivi,
        options=KiviOptions,
        requires=("torch",),
        provides=_kivi_provides,
        adapters=_gather,
        lossless=lambda options: False,
        kv_error=_kivi_error,
        source="Liu et al. 2024, KIVI: a tuning-free asymmetric 2bit quantization for KV cache, arXiv:2402.02750",
    ),
)
