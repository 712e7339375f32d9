"""Quantization algorithms in plain PyTorch."""

from __future__ import annotations

from typing import Any

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Role

from infermix_quant.options import GptqOptions, weight_only_bits


def _build_gptq(options: GptqOptions, context: None) -> Any:
    from infermix_quant.quantizer_gptq import GptqQuantizer

    return GptqQuantizer(options)


@hookimpl
def infermix_quantizer() -> list[Component]:
    common: dict[str, Any] = {
        "role": Role.QUANTIZER, "requires": ("torch",), "lossless": lambda options: False,
    }  # fmt: skip
    return [
        Component(
            name="gptq",
            summary="columns rounded one after another, each error carried into the next ones (needs calibration)",
            build=_build_gptq,
            options=GptqOptions,
            weight_bits=lambda options: weight_only_bits(options, 0 if options.symmetric else 8),
            **common,
        ),
    ]
