"""Quantizers without calibration whose products run in Triton kernels: W4A16, and W8A8 in int8 and FP8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from infermix.errors import WrongResult
from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.toolkit.linears import FoundLinear, check_group_size, check_scales, convert_linears, finite_linears
from infermix_kernels.launch import overlaps_launches
from infermix_kernels.matmul_launch import MatmulWorkspace
from infermix_kernels.matmul_table import LinearShape
from infermix_kernels.pack import pack_w4
from infermix_kernels.reference import ops as reference
from torch import Tensor

from infermix_triton.fuse_find import random_rows, relative_error
from infermix_triton.measured import matmul_table, tune_linears
from infermix_triton.quantizer_linears import Launching, TritonLinear, W4A16Linear, W8A8Linear

#: Kernel against plain product of the same quantized weight: one rounding of the result.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}
#: Activations near the middle of two numbers of 8 bits may be rounded either way.
_ROUNDED_TOLERANCE = 1.6e-2
_CHECKED_ROWS = (1, 5, 40)


class TritonQuantizer:
    """Converts every linear that `skip` does not name; the first of each shape is checked against its meaning."""

    method = kernel = ""
    precision_bits: float | None = None

    def __init__(self, skip: Sequence[str]) -> None:
        self._skip = skip

    def load_arguments(self) -> Mapping[str, Any]:
        return {}

    def apply(self, model: torch.nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Raises `UserError` when an option fits not every layer, `WrongResult` when a kernel is wrong."""
        found, skipped = finite_linears(model, self._skip)
        self.check(found)
        device = found[0].weight.device
        if context.tune and device.type == "cuda":
            tune_linears([self.shape(linear) for linear in found], device, context.progress)
        launching = Launching(MatmulWorkspace.allocate(device), overlaps_launches(device), matmul_table(device))
        num_weights = sum(linear.weight.numel() for linear in found)
        checked: set[tuple[int, int]] = set()

        def make(linear: FoundLinear) -> TritonLinear:
            made = self.quantize(linear, launching)
            if (made.out_features, made.in_features) not in checked:
                checked.add((made.out_features, made.in_features))
                _verify(made, linear.name, linear.weight.dtype)
            return made

        modules = convert_linears(model, found, make, context.progress)
        num_bytes = sum(module.num_bytes for module in modules.values() if isinstance(module, TritonLinear))
        return QuantizationReport(
            method=self.method,
            bits_per_weight=8 * num_bytes / num_weights,
            quantized_bytes=num_bytes,
            kernels=dict.fromkeys(modules, self.kernel),
            skipped=skipped,
            precision_bits=self.precision_bits,
        )

    def check(self, found: Sequence[FoundLinear]) -> None:
        """Raises `UserError` before anything is converted."""

    def shape(self, linear: FoundLinear) -> LinearShape:
        """What launch parameters of the quantized linear depend on."""
        raise NotImplementedError

    def quantize(self, linear: FoundLinear, launching: Launching) -> TritonLinear:
        raise NotImplementedError


class W4A16Quantizer(TritonQuantizer):
    """Weights rounded to the nearest of 16 levels per `group_size` columns."""

    def __init__(self, *, group_size: int, symmetric: bool, skip: Sequence[str]) -> None:
        super().__init__(skip)
        self._group_size, self._symmetric = group_size, symmetric
        self.method = f"rtn w4a16 group {group_size} {'symmetric' if symmetric else 'asymmetric'}"
        self.kernel = "triton w4a16"

    def check(self, found: Sequence[FoundLinear]) -> None:
        check_group_size(found, self._group_size)

    def shape(self, linear: FoundLinear) -> LinearShape:
        return LinearShape(
            "w4a16", linear.out_features, linear.in_features, self._group_size, not self._symmetric,
            linear.weight.element_size(),
        )  # fmt: skip

    def quantize(self, linear: FoundLinear, launching: Launching) -> TritonLinear:
        q, scales, zeros = round_to_groups(linear.weight, self._group_size, self._symmetric)
        check_scales(linear, scales)
        return W4A16Linear(pack_w4(q, scales, zeros), linear.bias, launching)


class W8A8Quantizer(TritonQuantizer):
    """Weights and activations in 8 bits: a scale per output of the weight and per token of the activation."""

    def __init__(self, dtype: torch.dtype, *, skip: Sequence[str]) -> None:
        super().__init__(skip)
        self._dtype = dtype
        self.precision_bits = None if dtype == torch.int8 else 4.0
        name = "int8" if dtype == torch.int8 else "fp8 e4m3"
        self.method, self.kernel = f"rtn w8a8 {name} per channel and token", f"triton w8a8 {name}"

    def shape(self, linear: FoundLinear) -> LinearShape:
        family: Literal["int8", "fp8"] = "int8" if self._dtype == torch.int8 else "fp8"
        return LinearShape(
            family, linear.out_features, linear.in_features, element_bytes=linear.weight.element_size()
        )

    def quantize(self, linear: FoundLinear, launching: Launching) -> TritonLinear:
        numbers, scale = reference.quantize_rows(linear.weight.detach().float(), self._dtype)
        return W8A8Linear(numbers.contiguous(), scale.contiguous(), linear.bias, launching)


def round_to_groups(weight: Tensor, group_size: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """`weight [N, K]` -> q `[N, K]` uint8 below 16, scales `[N, groups]` in 16 bits, zeros uint8 or `None` (8)."""
    groups = weight.detach().float().reshape(weight.shape[0], -1, group_size)
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    span = torch.maximum(high, -low) / 7 if symmetric else (high - low) / 15
    dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float16
    scale = span.clamp(min=2.0**-24 if dtype == torch.float16 else 2.0**-100).to(dtype)
    zero = torch.full_like(span, 8.0) if symmetric else torch.round(-low / scale.float()).clamp(0, 15)
    q = (torch.round(groups / scale.float()) + zero).clamp(0, 15).to(torch.uint8)
    zeros = None if symmetric else zero.to(torch.uint8).flatten(1)
    return q.view(weight.shape), scale.flatten(1), zeros


def _verify(module: TritonLinear, name: str, dtype: torch.dtype) -> None:
    for num_rows in _CHECKED_ROWS:
        like = next(iter(module.buffers())).new_empty(0, dtype=dtype)
        x = random_rows(num_rows, module.in_features, like)
        error = relative_error(module.product(x), module.plain(x))
        allowed = _ROUNDED_TOLERANCE if isinstance(module, W8A8Linear) else _TOLERANCES[dtype]
        if not error <= allowed:
            raise WrongResult(
                f"the {type(module).__name__} of {name} with {num_rows} rows differs by {error:.1e} from its meaning "
                f"({allowed:.0e} is allowed)"
            )
