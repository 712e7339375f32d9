"""bitsandbytes: LLM.int8, NF4 and FP4 (Dettmers et al., 2022 and 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Role
from infermix.roles.quantizer import QuantizerOptions
from infermix.toolkit.skip import UNTOUCHED
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts


class BitsandbytesOptions(QuantizerOptions, frozen=True, kw_only=True):
    method: Annotated[
        Literal["llm_int8", "nf4", "fp4"],
        Meta(description="int8 with outlier columns apart, or four bits: normal quantiles, or a tiny float"),
    ] = "nf4"
    threshold: Annotated[
        float, Meta(ge=0, description="llm_int8: columns of larger activations are multiplied in 16 bits; 0: none")
    ] = 6.0
    block_size: Annotated[
        Literal[32, 64, 128, 256, 512, 1024, 2048, 4096],
        Meta(description="nf4, fp4: weights that share a scale", extra={"unit": "weights"}),
    ] = 64
    double_quant: Annotated[bool, Meta(description="nf4, fp4: scales in 8 bits instead of fp32")] = False
    cpu_kernel: Annotated[
        Literal["packed", "plain"],
        Meta(
            description="nf4, fp4 on a CPU with AVX512-BF16; packed: the library's own choice, products in bf16 with "
            "scales in bf16 (double_quant undone); plain: dequantized in the model's dtype"
        ),
    ] = "packed"
    skip: Annotated[
        tuple[str, ...], Meta(description="patterns (as in a shell) of module names that stay as they are")
    ] = UNTOUCHED


def _build(options: BitsandbytesOptions, context: None) -> Any:
    from infermix_bitsandbytes.quantizer import FourBitQuantizer, LlmInt8Quantizer

    return LlmInt8Quantizer(options) if options.method == "llm_int8" else FourBitQuantizer(options)


def _needs(options: BitsandbytesOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"device:cpu|device:cuda"})


def _provides(options: BitsandbytesOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """Looking for outlier columns reads their number on the host."""
    return frozenset({"graph:no"} if options.method == "llm_int8" and options.threshold else ())


def _weight_bits(options: BitsandbytesOptions) -> float:
    """The least that it takes: scales of 4-bit blocks are fp32, but bf16 in the packed form of a CPU."""
    if options.method == "llm_int8":
        return 8.0
    return 4 + (8 + 32 / 256 if options.double_quant else 16) / options.block_size


@hookimpl
def infermix_quantizer() -> list[Component]:
    return [
        Component(
            name="bitsandbytes",
            role=Role.QUANTIZER,
            summary="LLM.int8, NF4 or FP4 as the library bitsandbytes stores and multiplies them",
            build=_build,
            options=BitsandbytesOptions,
            requires=("bitsandbytes",),
            extra="bitsandbytes",
            needs=_needs,
            provides=_provides,
            lossless=lambda options: False,
            weight_bits=_weight_bits,
            source="https://github.com/bitsandbytes-foundation/bitsandbytes",
        )
    ]
