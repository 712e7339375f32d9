"""Quantizers that convert one linear after another: `hqq`, `nf4`, `llm_int8`, `int8`, `fp8`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.toolkit.layerwise import walk_layers
from infermix.toolkit.linears import FoundLinear, convert_linears, finite_linears
from torch import Tensor, nn

from infermix_quant import common
from infermix_quant.cache import cached
from infermix_quant.hqq import HqqSettings, hqq
from infermix_quant.linear_fp8 import E4M3_MAX, E4M3_PRECISION, Fp8Linear, fp8_weight, round_e4m3
from infermix_quant.linear_grouped import QuantLinear
from infermix_quant.linear_int8 import INT8_MAX, Int8Linear, LlmInt8Linear, int8_weight
from infermix_quant.nf4 import Nf4Linear, check_blocks
from infermix_quant.observe import observe
from infermix_quant.options import Fp8Options, HqqOptions, Int8Options, LlmInt8Options, Nf4Options
from infermix_quant.static_scales import described_activations, peaks_of, round_int8_at, static_scale


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
        found, skipped = finite_linears(model, self._skip)
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
        return common.grouped(linear, hqq(linear.weight, settings))


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
        self._options = options
        what = "outlier columns of a call" if options.outliers == "columns" else "outliers"
        self.method = f"llm.int8 w8a8 per channel and token, {what} above {options.threshold:g} in 16 bits"

    def make(self, linear: FoundLinear) -> QuantLinear:
        weight, scale = int8_weight(linear.weight)
        return LlmInt8Linear(weight, scale, linear.bias, self._options.threshold, self._options.outliers)


class EightBitQuantizer(PlainQuantizer):
    """Weights and activations in 8 bits; activations per token, or with one static scale per input."""

    name = ""
    #: Largest number of the format, at which the range of a static scale ends.
    largest = 1.0

    def __init__(self, options: Fp8Options | Int8Options) -> None:
        super().__init__(options.skip)
        self.options = options
        self._peaks: dict[str, float] = {}

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Static scales are kept for the next run; the rest is as quickly done again."""
        if not self.options.calibrates:
            return super().apply(model, context)
        return cached(
            model, context, self.name, self.options, "", lambda: super(EightBitQuantizer, self).apply(model, context)
        )

    def prepare(self, model: nn.Module, found: Sequence[FoundLinear], context: QuantizerContext) -> None:
        """Activations of the unquantized model; linears outside the layers are measured nowhere."""
        if not self.options.calibrates:
            return
        common.inside_layers(model, found)
        samples = common.samples_of(context, f"{self.name} with static activation scales")
        for layer in walk_layers(model, samples, context.progress):
            inside = [linear for linear in found if linear.name.startswith(f"{layer.name}.")]
            groups = observe(layer, inside, gram=False, magnitudes=True)
            self._peaks.update(peaks_of(groups, self.options, self.round_at))

    def round_at(self, values: Tensor, peak: float) -> Tensor:
        """The values after rounding by a static scale whose range ends at `peak`."""
        raise NotImplementedError

    def fixed_scale(self, linear: FoundLinear) -> Tensor | None:
        """`None` where activations are measured per token: always, or outside the decoder layers."""
        peak = self._peaks.get(linear.name)
        return None if peak is None else static_scale(peak, self.largest, linear)


class Int8Quantizer(EightBitQuantizer):
    name, precision_bits, largest = "int8", 7.0, float(INT8_MAX)

    def __init__(self, options: Int8Options) -> None:
        super().__init__(options)
        self.method = f"int8 w8a8 weights per channel, activations {described_activations(options)}"

    def round_at(self, values: Tensor, peak: float) -> Tensor:
        return round_int8_at(values, peak)

    def make(self, linear: FoundLinear) -> QuantLinear:
        weight, scale = int8_weight(linear.weight)
        return Int8Linear(weight, scale, linear.bias, self.fixed_scale(linear))


class Fp8Quantizer(EightBitQuantizer):
    name, precision_bits, largest = "fp8", E4M3_PRECISION, E4M3_MAX

    def __init__(self, options: Fp8Options) -> None:
        super().__init__(options)
        self._fp8 = options
        self.method = f"fp8 e4m3 weights per {options.weights}, activations {described_activations(options)}"

    def round_at(self, values: Tensor, peak: float) -> Tensor:
        return round_e4m3(values * (E4M3_MAX / peak)).float() * (peak / E4M3_MAX)

    def make(self, linear: FoundLinear) -> QuantLinear:
        weight, scale = fp8_weight(linear.weight, self._fp8.weights)
        activations, fixed = self._fp8.activations, self.fixed_scale(linear)
        if activations == "tensor" and fixed is None:  # outside the decoder layers
            activations = "token"
        return Fp8Linear(weight, scale, linear.bias, activations=activations, input_scale=fixed)
