"""Hands every linear to bitsandbytes' own modules."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from bitsandbytes import functional as bnb_functional
from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.linears import FoundLinear
from infermix.toolkit.wrapped_linears import LibraryProduct, LibraryQuantizer
from torch import Tensor

if TYPE_CHECKING:
    from infermix_bitsandbytes.plugin import BitsandbytesOptions

_FOUR_BIT_PRECISION = {"nf4": None, "fp4": 2.0}
#: Products in 16 bits, scales rounded to bf16; activations in int8 (1 / 127 of the largest of a row).
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
_INT8_TOLERANCE = 4e-2
#: Rows of the packed form of a CPU come in blocks of this many.
_CPU_BLOCK = 32


class LlmInt8Quantizer(LibraryQuantizer):
    """int8 per output and token; columns with an activation beyond the threshold in the dtype of the activations."""

    def __init__(self, options: BitsandbytesOptions) -> None:
        super().__init__(options.skip)
        self._threshold = options.threshold
        self.method = f"bitsandbytes llm.int8 w8a8, outlier columns above {options.threshold:g} in 16 bits"

    def make(self, linear: FoundLinear, context: QuantizerContext) -> LibraryProduct:
        _without_cast_warnings()
        numbers, scale, _ = bnb_functional.int8_vectorwise_quant(linear.weight.detach().contiguous().half())
        module: Any = Linear8bitLt(
            linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, threshold=self._threshold,
            device="meta",
        )  # fmt: skip
        module.weight = Int8Params(numbers, requires_grad=False, has_fp16_weights=False, CB=numbers, SCB=scale)
        module.bias = _frozen(linear.bias)
        on = "igemmlt" if linear.weight.is_cuda else "torch._int_mm"
        return LibraryProduct(
            kernel=f"bitsandbytes int8 ({on})" + (", outlier columns in 16 bits" if self._threshold else ""),
            product=module.eval(),
            weight=numbers.float() * scale.float()[:, None] / 127,
            stored=lambda: (numbers, scale),
            tolerance=_INT8_TOLERANCE,
        )


class FourBitQuantizer(LibraryQuantizer):
    """NF4 or FP4 in blocks of the flattened matrix."""

    def __init__(self, options: BitsandbytesOptions) -> None:
        super().__init__(options.skip)
        self._options = options
        self.precision_bits = _FOUR_BIT_PRECISION[options.method]
        double = ", scales in 8 bits" if options.double_quant else ""
        self.method = f"bitsandbytes {options.method} blocks of {options.block_size}{double}"

    def make(self, linear: FoundLinear, context: QuantizerContext) -> LibraryProduct:
        options, weight = self._options, linear.weight.detach().contiguous()
        packed, state = bnb_functional.quantize_4bit(
            weight, blocksize=options.block_size, compress_statistics=options.double_quant, quant_type=options.method
        )
        module: Any = Linear4bit(
            linear.in_features, linear.out_features, bias=False, quant_type=options.method, device="meta",
            compute_dtype=weight.dtype,
        )  # fmt: skip
        dequantized = bnb_functional.dequantize_4bit(packed, state)
        module.weight = Params4bit(
            packed, quant_state=state, blocksize=options.block_size, compress_statistics=options.double_quant,
            quant_type=options.method, module=module, bnb_quantized=True,
        )  # fmt: skip
        module.quant_state, module.bias = state, _frozen(linear.bias)
        repacked = self._repacked(module, linear)
        module.support_avx512bf16_for_cpu = repacked
        return LibraryProduct(
            kernel=_four_bit_kernel(linear, repacked),
            product=module.eval(),
            weight=dequantized,
            stored=lambda: (module.weight.data, *_scales(module.weight.quant_state)),
            tolerance=_TOLERANCES[torch.bfloat16 if repacked else weight.dtype],
        )

    def _repacked(self, module: Any, linear: FoundLinear) -> bool:
        """Whether the first product turns the numbers into the packed form of a CPU; it stops at odd shapes."""
        fits = linear.out_features % _CPU_BLOCK == 0 and linear.in_features % self._options.block_size == 0
        allowed = self._options.cpu_kernel == "packed" and not linear.weight.is_cuda
        return bool(allowed and fits and module.support_avx512bf16_for_cpu)


def _four_bit_kernel(linear: FoundLinear, repacked: bool) -> str:
    if repacked:
        return "bitsandbytes gemv_4bit (AVX512-BF16)"
    if linear.weight.is_cuda:
        return "bitsandbytes gemm_4bit (dequantize+matmul for many rows)"
    return "bitsandbytes dequantize+matmul"


def _scales(state: Any) -> Sequence[Tensor]:
    """Scales of blocks; with double quantization their 8-bit numbers, the scales of those, and their mean."""
    return (state.absmax, state.state2.absmax, state.offset) if state.nested else (state.absmax,)


def _frozen(bias: Tensor | None) -> torch.nn.Parameter | None:
    return None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)


def _without_cast_warnings() -> None:
    """The library warns at every product that activations are rounded from fp16: a line a linear and step."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
