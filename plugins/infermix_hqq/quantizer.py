"""Hands every linear to `HQQLinear`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from infermix.errors import UserError
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.linears import FoundLinear, check_group_size
from infermix.toolkit.wrapped_linears import LibraryProduct, LibraryQuantizer
from torch import Tensor

if TYPE_CHECKING:
    from infermix_hqq.plugin import HqqLibraryOptions

#: Weights are expanded to the model's dtype in every product.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}


class HqqLibraryQuantizer(LibraryQuantizer):
    def __init__(self, options: HqqLibraryOptions) -> None:
        super().__init__(options.skip)
        self._options = options
        self.method = f"hqq library w{options.bits} group {options.group_size} axis {options.axis}"

    def check(self, found: Sequence[FoundLinear]) -> None:
        if self._options.axis == 1:
            check_group_size(found, self._options.group_size)
            return
        for linear in found:
            if linear.weight.numel() % self._options.group_size:
                raise UserError(
                    f"groups of {self._options.group_size} do not divide the weights of {linear.name}",
                    key="parts.quantizer.group_size",
                )

    def make(self, linear: FoundLinear, context: QuantizerContext) -> LibraryProduct:
        options, bias = self._options, linear.bias
        config = BaseQuantizeConfig(nbits=options.bits, group_size=options.group_size, axis=options.axis)
        module = HQQLinear.from_weights(
            linear.weight.detach().contiguous(),
            None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False),
            config,
            compute_dtype=linear.weight.dtype,
            device=str(linear.weight.device),
        )
        return LibraryProduct(
            kernel="hqq dequantize+matmul",
            product=module.forward_pytorch,
            weight=module.dequantize(),
            stored=lambda: _stored(module),
            tolerance=_TOLERANCES[linear.weight.dtype],
        )


def _stored(module: Any) -> list[Tensor]:
    return [module.W_q.data, module.meta["scale"], module.meta["zero"]]
