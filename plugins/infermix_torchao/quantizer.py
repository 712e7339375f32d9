"""Lets torchao convert one linear at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from infermix.errors import Unsupported
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.linears import FoundLinear, check_group_size
from infermix.toolkit.wrapped_linears import LibraryProduct, LibraryQuantizer
from torch import Tensor, nn
from torchao.quantization import quantize_

if TYPE_CHECKING:
    from infermix_torchao.plugin import TorchaoOptions

#: Significant bits of FP8 E4M3.
_PRECISION = {"fp8": 4.0, "fp8_dynamic": 4.0}
#: Weights are expanded to the model's dtype, or products run in bf16; FP8 activations keep 4 significant bits.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
_FP8_TOLERANCE = 6e-2
_WIDE_ROWS = 4096


class TorchaoQuantizer(LibraryQuantizer):
    def __init__(self, options: TorchaoOptions) -> None:
        super().__init__(options.skip)
        self._method, self._group_size = options.method, options.group_size
        self.precision_bits = _PRECISION.get(options.method)
        shared = f"group {options.group_size}" if options.method == "int4" else "per channel"
        activations = ", activations per token" if options.method == "fp8_dynamic" else ", weights only"
        self.method = f"torchao {options.method.partition('_')[0]} {shared}{activations}"

    def check(self, found: Sequence[FoundLinear]) -> None:
        if self._method == "int4":
            check_group_size(found, self._group_size)

    def make(self, linear: FoundLinear, context: QuantizerContext) -> LibraryProduct:
        module = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        module.weight = nn.Parameter(linear.weight.detach().contiguous(), requires_grad=False)
        quantize_(nn.Sequential(module), self._config(linear))
        weight = module.weight.data
        if type(weight) is Tensor:
            raise Unsupported(f"torchao leaves {linear.name} as it is: {self._method} does not fit {weight.shape}")
        bias = None if linear.bias is None else linear.bias.detach()
        dynamic = self._method == "fp8_dynamic"
        return LibraryProduct(
            kernel=f"torchao {_kernel(self._method, linear)}",
            product=lambda x: F.linear(x, weight, bias),
            weight=_dequantized(weight, linear),
            stored=lambda: list(_inner(weight)),
            tolerance=_FP8_TOLERANCE if dynamic else _TOLERANCES[linear.weight.dtype],
        )

    def _config(self, linear: FoundLinear) -> Any:
        """Settings of inductor are global: they are left alone."""
        from torchao import quantization as ao

        if self._method == "int8":
            return ao.Int8WeightOnlyConfig(set_inductor_config=False)
        if self._method == "fp8":
            return ao.Float8WeightOnlyConfig(set_inductor_config=False)
        if self._method == "fp8_dynamic":
            return ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow(), set_inductor_config=False)
        if linear.weight.is_cuda:
            return ao.Int4WeightOnlyConfig(
                group_size=self._group_size, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
            )
        from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=self._group_size, set_inductor_config=False)


def _kernel(method: str, linear: FoundLinear) -> str:
    if method == "int4":
        return "int4 (tinygemm)" if linear.weight.is_cuda else "int4 (_weight_int4pack_mm_for_cpu)"
    if method == "fp8_dynamic":
        return "fp8 (_scaled_mm)"
    return f"{method} (dequantize+matmul)" if method == "fp8" else "int8 (product with int8 weights, then scales)"


def _dequantized(weight: Any, linear: FoundLinear) -> Tensor:
    """int4 weights are packed for their kernel alone: what they are worth is their product with the identity."""
    if not hasattr(weight, "scale_and_zero"):
        dequantized: Tensor = weight.dequantize()
        return dequantized
    eye = torch.eye(linear.in_features, dtype=linear.weight.dtype, device=linear.weight.device)
    columns = [F.linear(rows, weight) for rows in eye.split(_WIDE_ROWS)]
    return torch.cat(columns).t()


def _inner(weight: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor subclass is made of."""
    names, _ = weight.__tensor_flatten__()
    for name in names:
        yield getattr(weight, name)
