"""Quantization algorithms in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, FeatureRule, Features, Options, Role, no_features
from infermix.toolkit.group_sizes import group_needs
from infermix.toolkit.skip import UNTOUCHED

from infermix_quant.options import (
    AwqOptions,
    Fp8Options,
    GptqOptions,
    HqqOptions,
    Int8Options,
    LlmInt8Options,
    Nf4Options,
    SmoothQuantOptions,
    nf4_bits,
    weight_only_bits,
)

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts


def _built_by(module: str, name: str) -> Callable[[Any, None], Any]:
    """Imports torch when a part is built, not before."""

    def build(options: Any, context: None) -> Any:
        return getattr(import_module(f"infermix_quant.{module}"), name)(options)

    return build


def _quantizer(
    name: str,
    summary: str,
    options: type[Options],
    weight_bits: Callable[[Any], float | None],
    module: str,
    kind: str,
    needs: FeatureRule = no_features,
) -> Component:
    return Component(
        name=name,
        role=Role.QUANTIZER,
        summary=summary,
        build=_built_by(module, kind),
        options=options,
        requires=("torch",),
        needs=needs,
        lossless=lambda _: False,
        weight_bits=weight_bits,
    )


def _groups(options: GptqOptions | AwqOptions | HqqOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """Groups must divide every row. With patterns of one's own the layers are known at load only."""
    return group_needs(model, options.group_size) if options.skip == UNTOUCHED else frozenset()


def _reads(options: Options, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"weights:gptq", "weights:awq", "weights:compressed-tensors"})


def _needs_packed(options: Options, model: ModelFacts, machine: MachineFacts) -> Features:
    """Refuses a model whose weights are not quantized yet."""
    packed = any(name.startswith("weights:") for name in model.features)
    return frozenset() if packed else frozenset({"weights:packed"})


def _eight_bits(options: Options) -> float:
    """Scales depend on the layer and stay below 0.1 bits."""
    return 8.0


def _integer_bits(options: GptqOptions | AwqOptions) -> float:
    return weight_only_bits(options, 0 if options.symmetric else 8)


def _hqq_bits(options: HqqOptions) -> float:
    return weight_only_bits(options, 16)


@hookimpl
def infermix_quantizer() -> list[Component]:
    gptq = "columns rounded one after another, each error carried into the next ones (calibrated)"
    awq = "channels of large activations scaled up before rounding, ranges clipped (calibrated)"
    smooth = "int8 weights and activations, outlier channels moved into the weights (calibrated)"
    hqq = "zero points that make a robust norm of the weights' error small, no data"
    nf4 = "four bits at the quantiles of a normal distribution, a scale per block"
    llm_int8 = "int8 weights and activations, large activations apart in the model's dtype"
    int8 = "int8 weights, int8 activations per token or with a static scale"
    fp8 = "FP8 E4M3 weights, activations per token, with a static scale, or as they are"
    folded, plain = "quantizers_folded", "quantizers_plain"
    checkpoint = Component(
        name="checkpoint",
        role=Role.QUANTIZER,
        summary="the quantized weights of the model's own files: GPTQ, AWQ, compressed-tensors",
        build=_built_by("quantizer_checkpoint", "CheckpointQuantizer"),
        requires=("torch",),
        needs=_needs_packed,
        provides=_reads,
        lossless=lambda _: False,
    )
    return [
        checkpoint,
        _quantizer("gptq", gptq, GptqOptions, _integer_bits, "quantizer_gptq", "GptqQuantizer", _groups),
        _quantizer("awq", awq, AwqOptions, _integer_bits, folded, "AwqQuantizer", _groups),
        _quantizer("smoothquant", smooth, SmoothQuantOptions, _eight_bits, folded, "SmoothQuantQuantizer"),
        _quantizer("hqq", hqq, HqqOptions, _hqq_bits, plain, "HqqQuantizer", _groups),
        _quantizer("nf4", nf4, Nf4Options, nf4_bits, plain, "Nf4Quantizer"),
        _quantizer("llm_int8", llm_int8, LlmInt8Options, _eight_bits, plain, "LlmInt8Quantizer"),
        _quantizer("int8", int8, Int8Options, _eight_bits, plain, "Int8Quantizer"),
        _quantizer("fp8", fp8, Fp8Options, _eight_bits, plain, "Fp8Quantizer"),
    ]
