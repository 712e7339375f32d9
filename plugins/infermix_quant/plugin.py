"""Quantization algorithms in plain PyTorch."""

from __future__ import annotations

from typing import Any

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Role

from infermix_quant.options import (
    AwqOptions,
    Fp8Options,
    GptqOptions,
    HqqOptions,
    LlmInt8Options,
    Nf4Options,
    SmoothQuantOptions,
    nf4_bits,
    weight_only_bits,
)


def _build_gptq(options: GptqOptions, context: None) -> Any:
    from infermix_quant.quantizer_gptq import GptqQuantizer

    return GptqQuantizer(options)


def _build_awq(options: AwqOptions, context: None) -> Any:
    from infermix_quant.quantizers_folded import AwqQuantizer

    return AwqQuantizer(options)


def _build_smoothquant(options: SmoothQuantOptions, context: None) -> Any:
    from infermix_quant.quantizers_folded import SmoothQuantQuantizer

    return SmoothQuantQuantizer(options)


def _build_hqq(options: HqqOptions, context: None) -> Any:
    from infermix_quant.quantizers_plain import HqqQuantizer

    return HqqQuantizer(options)


def _build_nf4(options: Nf4Options, context: None) -> Any:
    from infermix_quant.quantizers_plain import Nf4Quantizer

    return Nf4Quantizer(options)


def _build_llm_int8(options: LlmInt8Options, context: None) -> Any:
    from infermix_quant.quantizers_plain import LlmInt8Quantizer

    return LlmInt8Quantizer(options)


def _build_fp8(options: Fp8Options, context: None) -> Any:
    from infermix_quant.quantizers_plain import Fp8Quantizer

    return Fp8Quantizer(options)


@hookimpl
def infermix_quantizer() -> list[Component]:
    common: dict[str, Any] = {"role": Role.QUANTIZER, "requires": ("torch",), "lossless": lambda options: False}
    return [
        Component(
            name="gptq",
            summary="columns rounded one after another, each error carried into the next ones (calibrated)",
            build=_build_gptq,
            options=GptqOptions,
            weight_bits=lambda options: weight_only_bits(options, 0 if options.symmetric else 8),
            **common,
        ),
        Component(
            name="awq",
            summary="channels of large activations scaled up before rounding, ranges clipped (calibrated)",
            build=_build_awq,
            options=AwqOptions,
            weight_bits=lambda options: weight_only_bits(options, 0 if options.symmetric else 8),
            **common,
        ),
        Component(
            name="smoothquant",
            summary="int8 weights and activations, outlier channels moved into the weights (calibrated)",
            build=_build_smoothquant,
            options=SmoothQuantOptions,
            weight_bits=lambda options: 8.0,
            **common,
        ),
        Component(
            name="hqq",
            summary="zero points that make a robust norm of the weights' error small, no data",
            build=_build_hqq,
            options=HqqOptions,
            weight_bits=lambda options: weight_only_bits(options, 16),
            **common,
        ),
        Component(
            name="nf4",
            summary="four bits at the quantiles of a normal distribution, a scale per block",
            build=_build_nf4,
            options=Nf4Options,
            weight_bits=nf4_bits,
            **common,
        ),
        Component(
            name="llm_int8",
            summary="int8 weights and activations, large activations apart in the model's dtype",
            build=_build_llm_int8,
            options=LlmInt8Options,
            weight_bits=lambda options: 8.0,
            **common,
        ),
        Component(
            name="fp8",
            summary="FP8 E4M3 weights, activations per token, with a static scale, or as they are",
            build=_build_fp8,
            options=Fp8Options,
            weight_bits=lambda options: 8.0,
            **common,
        ),
    ]
