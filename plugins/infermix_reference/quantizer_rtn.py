"""Quantizer `rtn`: weights rounded to the nearest of 256, 16, 8 or 4 levels, no calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.toolkit.linears import (
    FoundLinear,
    QuantizedLinear,
    check_group_size,
    check_scales,
    convert_linears,
    finite_linears,
)
from torch import Tensor, nn

from infermix_reference.linear_int8_rows import Int8RowsLinear, multiplies_rows


class RtnQuantizer:
    """`granularity` says what shares a scale: the matrix, an output row, or `group_size` weights of a row."""

    def __init__(
        self, *, bits: int, granularity: str, group_size: int, symmetric: bool, skip: Sequence[str] = ()
    ) -> None:
        self._bits, self._granularity, self._group_size = bits, granularity, group_size
        self._symmetric, self._skip = symmetric, skip

    def load_arguments(self) -> Mapping[str, Any]:
        return {}

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Raises `UserError`, with the model unchanged, for bad weights or groups that do not fit."""
        found, skipped = finite_linears(model, self._skip)
        if self._granularity == "group":
            check_group_size(found, self._group_size)
        num_weights = sum(linear.weight.numel() for linear in found)
        made = convert_linears(model, found, lambda linear: self._quantize(linear, context), context.progress)
        linears = {name: each for name, each in made.items() if isinstance(each, QuantizedLinear | Int8RowsLinear)}
        num_bytes = sum(linear.num_bytes for linear in linears.values())
        return QuantizationReport(
            method=self._method(),
            bits_per_weight=8 * num_bytes / num_weights,
            quantized_bytes=num_bytes,
            kernels={name: each.kernel for name, each in linears.items()},
            skipped=skipped,
        )

    def _method(self) -> str:
        shared = f"group {self._group_size}" if self._granularity == "group" else f"per {self._granularity}"
        return f"rtn w{self._bits} {shared} {'symmetric' if self._symmetric else 'asymmetric'}"

    def _quantize(self, linear: FoundLinear, context: QuantizerContext) -> QuantizedLinear | Int8RowsLinear:
        q, scale, zero = round_to_nearest(
            linear.weight,
            bits=self._bits,
            num_groups=linear.in_features // self._group_size if self._granularity == "group" else 1,
            per_tensor=self._granularity == "tensor",
            symmetric=self._symmetric,
        )
        check_scales(linear, scale)
        plain = self._bits == 8 and self._granularity == "channel" and zero is None
        if plain and multiplies_rows(scale.dtype, context.device, linear.in_features):
            return Int8RowsLinear((q.to(torch.int16) - 128).to(torch.int8), scale[:, 0], linear.bias)
        return QuantizedLinear(q, scale, zero, bits=self._bits, bias=linear.bias)


def round_to_nearest(
    weight: Tensor, *, bits: int, num_groups: int, per_tensor: bool, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`weight [out, in]` -> q `[out, in]` uint8, scale `[out or 1, num_groups]` in 16 bits, zero (or `None`).

    The error of a weight is at most half its scale. Scales are rounded up to their dtype *before* weights are
    rounded to them, so that none is clipped and no second error arises.
    """
    groups = weight.detach().float().reshape(weight.shape[0], num_groups, -1)
    dims = (0, 1, 2) if per_tensor else (2,)
    low = groups.amin(dim=dims, keepdim=True).clamp(max=0)
    high = groups.amax(dim=dims, keepdim=True).clamp(min=0)
    middle, levels = 2 ** (bits - 1), 2**bits - 1
    span = torch.maximum(high, -low) / (middle - 1) if symmetric else (high - low) / levels
    scale = _rounded_up(span, weight.dtype)
    zero = torch.full_like(span, middle) if symmetric else torch.round(-low / scale.float())
    q = (torch.round(groups / scale.float()) + zero).clamp(0, levels)
    packed_zero = None if symmetric else zero.to(torch.uint8).flatten(1)
    return q.to(torch.uint8).view(weight.shape), scale.flatten(1), packed_zero


def _rounded_up(span: Tensor, weight_dtype: torch.dtype) -> Tensor:
    """The next 16-bit number at or above `span`, at least the smallest positive one that is safe to divide by."""
    dtype = torch.bfloat16 if weight_dtype == torch.bfloat16 else torch.float16
    span = span.clamp(min=2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).smallest_normal)
    rounded = span.to(dtype)
    next_up = (rounded.view(torch.int16) + 1).view(dtype)
    return torch.where(rounded.float() < span, next_up, rounded)
