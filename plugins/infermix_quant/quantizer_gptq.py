"""Quantizer `gptq`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.toolkit.layerwise import CalibrationLayer, walk_layers
from infermix.toolkit.linears import FoundLinear, finite_linears, replace_module
from torch import nn

from infermix_quant import common
from infermix_quant.cache import cached
from infermix_quant.gptq import GptqSettings, gptq, output_error
from infermix_quant.grid import Quantized
from infermix_quant.linear_grouped import QuantLinear
from infermix_quant.observe import InputGroup, observe
from infermix_quant.options import GptqOptions


class GptqQuantizer:
    """Quantizes the linears of every decoder layer; those outside the layers stay as they are."""

    def __init__(self, options: GptqOptions) -> None:
        self._options = options

    def load_arguments(self) -> Mapping[str, Any]:
        return {}

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Raises `UserError`, with the model unchanged, when an option fits not every linear."""
        done = cached(model, context, "gptq", self._options, "gptq", lambda: self._apply(model, context))
        return common.on_device(model, context, done)

    def _apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        options = self._options
        found, skipped = finite_linears(model, options.skip)
        inside = common.inside_layers(model, found)
        common.check_groups(inside, options.group_size)
        common.check_patterns(inside, list(options.bits_for))
        del inside  # which would keep the old weights
        samples = common.samples_of(context, "gptq")
        made: dict[str, QuantLinear] = {}
        errors: list[float] = []
        for layer in walk_layers(model, samples, context.progress):
            for group in self._stages(layer, found):
                for linear, weight, error in self._quantize(group):
                    made[linear.name] = common.grouped(linear, weight)
                    errors.append(error)
                    replace_module(model, linear.name, made[linear.name])
            found = [linear for linear in found if linear.name not in made]  # frees the old weights of this layer
        outside = tuple(linear.name for linear in found)
        details = {"mean_output_error": fmean(errors)}
        return common.report(self._method(), made, (*skipped, *outside), details)

    def _method(self) -> str:
        options = self._options
        order = " act-order" if options.act_order else ""
        static = " static groups" if options.static_groups else ""
        sizes = common.described(options.bits, options.bits_for, options.group_size, options.symmetric)
        return f"gptq {sizes}{order}{static}, per {options.sequential}"

    def _stages(self, layer: CalibrationLayer, found: Sequence[FoundLinear]) -> Iterator[InputGroup]:
        """Groups of linears with their statistics, gathered anew for every group when `sequential: operator`."""
        left = [linear for linear in found if linear.name.startswith(f"{layer.name}.")]
        while left:
            groups = observe(layer, left, gram=True)
            taken = groups[:1] if self._options.sequential == "operator" else groups
            yield from taken
            done = {linear.name for group in taken for linear in group.linears}
            left = [linear for linear in left if linear.name not in done]

    def _quantize(self, group: InputGroup) -> Iterator[tuple[FoundLinear, Quantized, float]]:
        """Linears of one input and equal bits are rounded together: their rows do not depend on each other."""
        options = self._options
        assert group.gram is not None
        by_bits: dict[int, list[FoundLinear]] = {}
        for linear in group.linears:
            by_bits.setdefault(common.bits_of(linear, options.bits, options.bits_for), []).append(linear)
        for bits, linears in by_bits.items():
            names = ", ".join(linear.name for linear in linears)
            weight = torch.cat([linear.weight for linear in linears])
            size = common.group_size_of(linears[0], options.group_size)
            result = gptq(weight, group.gram, self._settings(bits, size), names)
            error = output_error(weight, result.dequantize(), group.gram)
            start = 0
            for linear in linears:
                rows = slice(start, start + linear.out_features)
                yield linear, _rows(result, rows), error
                start += linear.out_features

    def _settings(self, bits: int, group_size: int) -> GptqSettings:
        options = self._options
        return GptqSettings(
            bits=bits, group_size=group_size, symmetric=options.symmetric, damping=options.damping,
            block_size=options.block_size, act_order=options.act_order, static_groups=options.static_groups,
        )  # fmt: skip


def _rows(weight: Quantized, rows: slice) -> Quantized:
    zero = None if weight.zero is None else weight.zero[rows].clone()
    return Quantized(weight.q[rows], weight.scale[rows].clone(), zero, weight.bits, weight.group)
