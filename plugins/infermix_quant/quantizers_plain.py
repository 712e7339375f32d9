"""Quantizers that convert one linear after another: `hqq`, `nf4`, `llm_int8`, `fp8`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.toolkit.layerwise import walk_layers
from infermix.toolkit.linears import FoundLinear, convert_linears
from torch import Tensor, nn

from infermix_quant import common
from infermix_quant.cache import cached
from infermix_quant.hqq import HqqSettings, hqq
from infermix_quant.linear_fp8 import E4M3_MAX, E4M3_PRECISION, Fp8Linear, fp8_weight
from infermix_quant.linear_grouped import QuantLinear, make_linear
from infermix_quant.linear_int8 import LlmInt8Linear, int8_weight
from infermix_quant.nf4 import Nf4Linear, check_blocks
from infermix_quant.observe import observe
from infermix_quant.options import Fp8Options, HqqOptions, LlmInt8Options, Nf4Options


class PlainQuantizer:
    """Checks every linear, then converts each by `make`."""

    method = ""
    precision_bits: float | None = None

    def __init__(self, skip: Sequence[str]) -> None:
        self._skip = skip

    def load_arguments(self) -> Mapping[str, Any]:
        return {}

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Raises `UserError`, with the model unchanged, when an option fits not every linear."""
        found, skipped = common.linears_of(model, self._skip)
        self.check(found)
        self.prepare(model, found, context)
        made: dict[str, Any] = convert_linears(model, found, self.make, context.progress)
        done = common.report(self.method, made, skipped, precision_bits=self.precision_bits)
        return common.on_device(model, context, done)

    def check(self, found: Sequence[FoundLinear]) -> None:
        """Raises `UserError` before anything is converted."""

    def prepare(self, model: nn.Module, found: Sequence[FoundLinear], context: QuantizerContext) -> None:
        """Whatever has to be known of all linears before the first is converted."""

    def make(self, linear: FoundLinear) -> QuantLinear:
        raise NotImplementedError


class HqqQuantizer(PlainQuantizer):
    def __init__(self, options: HqqOptions) -> None:
        super().__init__(options.skip)
        self._options = options
        self.method = f"hqq {common.described(options.bits, options.bits_for, options.group_size)}"

    def check(self, found: Sequence[FoundLinear]) -> None:
        common.check_groups(found, self._options.group_size)
        common.check_patterns(found, list(self._options.bits_for))

    def make(self, linear: FoundLinear) -> QuantLinear:
        options = self._options
        settings = HqqSettings(
            bits=common.bits_of(linear, options.bits, options.bits_for),
            group_size=common.group_size_of(linear, options.group_size),
            iterations=options.iterations, norm=options.norm, beta=options.beta, kappa=options.kappa,
        )  # fmt: skip
        return make_linear(hqq(linear.weight, settings), linear.bias)


class Nf4Quantizer(PlainQuantizer):
    def __init__(self, options: Nf4Options) -> None:
        super().__init__(options.skip)
        self._options = options
        double = f", scales in 8 bits per {options.scale_block}" if options.double_quant else ""
        self.method = f"nf4 blocks of {options.block_size}{double}"

    def check(self, found: Sequence[FoundLinear]) -> None:
        for linear in found:
            check_blocks(linear, self._options.block_size)

    def make(self, linear: FoundLinear) -> QuantLinear:
        options = self._options
        scale_block = options.scale_block if options.double_quant else None
        return Nf4Linear(linear.weight, linear.bias, block_size=options.block_size, scale_block=scale_block)


class LlmInt8Quantizer(PlainQuantizer):
    def __init__(self, options: LlmInt8Options) -> None:
        super().__init__(options.skip)
        self._threshold = options.threshold
        self.method = f"llm.int8 w8a8 per channel and token, outliers above {options.threshold:g} in 16 bits"

    def make(self, linear: FoundLinear) -> QuantLinear:
        weight, scale = int8_weight(linear.weight)
        return LlmInt8Linear(weight, scale, linear.bias, self._threshold)


class Fp8Quantizer(PlainQuantizer):
    """E4M3 weights; activations as they are, per token, or with one fixed scale per linear from calibration."""

    precision_bits = E4M3_PRECISION

    def __init__(self, options: Fp8Options) -> None:
        super().__init__(options.skip)
        self._options = options
        self._peaks: dict[str, Tensor] = {}
        kinds = {"none": "activations as they are", "token": "per token", "tensor": "one static scale per input"}
        self.method = f"fp8 e4m3 weights per {options.weights}, {kinds[options.activations]}"

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Static scales are kept for the next run; the rest is as quickly done again."""
        if self._options.activations != "tensor":
            return super().apply(model, context)
        return cached(
            model, context, "fp8", self._options, "", lambda: super(Fp8Quantizer, self).apply(model, context)
        )

    def prepare(self, model: nn.Module, found: Sequence[FoundLinear], context: QuantizerContext) -> None:
        """Largest activations of the unquantized model; linears outside the layers are measured nowhere."""
        if self._options.activations != "tensor":
            return
        samples = common.samples_of(context, "fp8 with static activation scales")
        for layer in walk_layers(model, samples, context.progress):
            inside = [linear for linear in found if linear.name.startswith(f"{layer.name}.")]
            for group in observe(layer, inside, gram=False):
                assert group.max_abs is not None
                self._peaks.update(dict.fromkeys((each.name for each in group.linears), group.max_abs.amax()))

    def make(self, linear: FoundLinear) -> QuantLinear:
        weight, scale = fp8_weight(linear.weight, self._options.weights)
        activations, peak = self._options.activations, self._peaks.get(linear.name)
        if activations == "tensor" and peak is None:  # outside the decoder layers
            activations = "token"
        fixed = None if peak is None else (peak.clamp_min(1e-30) / E4M3_MAX).to(torch.float32)
        return Fp8Linear(weight, scale, linear.bias, activations=activations, input_scale=fixed)
