"""What the quantizers share: which linears, what fits, and what is reported."""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from infermix.errors import UserError
from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.toolkit.layerwise import decoder_layers
from infermix.toolkit.linears import FoundLinear, check_group_size, check_scales
from torch import nn

from infermix_quant.grid import Quantized
from infermix_quant.linear_grouped import QuantLinear, make_linear


def check_groups(found: Sequence[FoundLinear], group_size: int) -> None:
    """0 stands for whole rows. Raises `UserError` naming a layer that does not fit, and sizes that would."""
    if group_size:
        check_group_size(found, group_size)


def inside_layers(model: nn.Module, found: Sequence[FoundLinear]) -> list[FoundLinear]:
    """The linears that calibration reaches: those of decoder layers. Raises `UserError` when `skip` leaves none."""
    prefixes = tuple(f"{name}." for name, _ in decoder_layers(model))
    inside = [linear for linear in found if linear.name.startswith(prefixes)]
    if not inside:
        raise UserError(
            f"skip leaves no linear of a decoder layer, only {found[0].name}, where nothing is calibrated",
            key="parts.quantizer.skip",
            hint=f"patterns that leave some linears of {prefixes[0]}*",
        )
    return inside


def group_size_of(linear: FoundLinear, group_size: int) -> int:
    return group_size or linear.in_features


def bits_of(linear: FoundLinear, bits: int, bits_for: Mapping[str, int]) -> int:
    """Of the first pattern that matches the name, otherwise `bits`."""
    return next((number for pattern, number in bits_for.items() if fnmatch.fnmatch(linear.name, pattern)), bits)


def grouped(linear: FoundLinear, weight: Quantized) -> QuantLinear:
    """The linear of rounded weights. Raises `UserError` for weights so large that 16-bit scales do not hold them."""
    check_scales(linear, weight.scale)
    return make_linear(weight, linear.bias)


def check_patterns(found: Sequence[FoundLinear], patterns: Sequence[str]) -> None:
    """Raises `UserError` for a pattern of `bits_for` that matches no linear."""
    for pattern in patterns:
        if not any(fnmatch.fnmatch(linear.name, pattern) for linear in found):
            raise UserError(
                f"no quantized linear matches {pattern!r}",
                key="parts.quantizer.bits_for",
                hint=f"names are such as {found[0].name}",
            )


def samples_of(context: QuantizerContext, name: str) -> Sequence[Sequence[int]]:
    if context.calibration is None:
        raise UserError(f"{name} needs calibration data", key="parts.quantizer.calibration")
    return context.calibration()


def report(
    method: str,
    made: Mapping[str, QuantLinear],
    skipped: tuple[str, ...],
    details: Mapping[str, Any] | None = None,
    precision_bits: float | None = None,
) -> QuantizationReport:
    num_bytes = sum(linear.num_bytes for linear in made.values())
    num_weights = sum(linear.in_features * linear.out_features for linear in made.values())
    return QuantizationReport(
        method=method,
        bits_per_weight=8 * num_bytes / num_weights,
        quantized_bytes=num_bytes,
        kernels={name: linear.kernel for name, linear in made.items()},
        skipped=skipped,
        details=details or {},
        precision_bits=precision_bits,
    )


def on_device(model: nn.Module, context: QuantizerContext, done: QuantizationReport) -> QuantizationReport:
    """On a GPU with Triton, linears that a kernel multiplies move into it; the report says what each one got."""
    if not context.device.startswith("cuda") or importlib.util.find_spec("triton") is None:
        return done
    from infermix_quant.kernel_linears import use_kernels

    modules = dict(model.named_modules())
    linears = {name: modules[name] for name in done.kernels}
    made = use_kernels(
        model, {name: each for name, each in linears.items() if isinstance(each, QuantLinear)}, context
    )
    return report(done.method, made, done.skipped, done.details, done.precision_bits)


def described(bits: int, bits_for: Mapping[str, int], group_size: int, symmetric: bool | None = None) -> str:
    """Such as `w4 group 64 symmetric`."""
    shared = f"group {group_size}" if group_size else "per channel"
    mixed = "".join(f" {pattern}:w{number}" for pattern, number in bits_for.items())
    kind = "" if symmetric is None else " symmetric" if symmetric else " asymmetric"
    return f"w{bits}{mixed} {shared}{kind}"
