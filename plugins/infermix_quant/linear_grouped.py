"""Weight-only linears: integers of 2, 3, 4 or 8 bits in groups, dequantized in every forward or read by a kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from infermix.toolkit.packed_columns import pack_columns, unpack_columns
from torch import Tensor, nn

from infermix_quant.grid import Quantized


class QuantLinear(nn.Module):
    """What every linear of this package has. `kernel` is the name of what multiplies."""

    kernel = ""

    def __init__(self, out_features: int, in_features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def num_bytes(self) -> int:
        """Numbers, scales, zero points and column orders."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kernel={self.kernel}"


class GroupedLinear(QuantLinear):
    """`w = (q - zero) * scale`, expanded to x's dtype in every forward. Columns are stored sorted by group."""

    kernel = "dequantize+matmul"
    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__(weight.q.shape[0], weight.q.shape[1], bias)
        self.bits = weight.bits
        order = column_order(weight)
        q = weight.q if order is None else weight.q[:, order]
        self.register_buffer("packed", pack_columns(q, weight.bits))
        self.register_buffer("scale", weight.scale.contiguous())
        self.register_buffer("zero", weight.zero)
        self.register_buffer("order", None if order is None else order.to(torch.int32))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """`[out, in]`, columns as they are stored."""
        q = unpack_columns(self.packed, self.bits, self.in_features).to(dtype)
        weight = q.view(self.out_features, self.scale.shape[1], -1)
        weight -= 2 ** (self.bits - 1) if self.zero is None else self.zero.to(dtype)[:, :, None]
        weight *= self.scale.to(dtype)[:, :, None]
        return weight.view(self.out_features, self.in_features)

    def unpacked(self) -> Quantized:
        """What it was made of, columns in the order of x."""
        q, group = unpack_columns(self.packed, self.bits, self.in_features), None
        if self.order is not None:
            back = torch.argsort(self.order.long())
            q, group = q[:, back], back // (self.in_features // self.scale.shape[1])
        return Quantized(q, self.scale, self.zero, self.bits, group)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x.index_select(-1, self.order)
        return F.linear(x, self.dequantize(x.dtype), self.bias)


def column_order(weight: Quantized) -> Tensor | None:
    """Columns sorted by group, `None` when they already are. All groups must be equally large."""
    if weight.group is None:
        return None
    group = weight.group.long()
    size = group.numel() // weight.scale.shape[1]
    counts = torch.bincount(group, minlength=weight.scale.shape[1])
    assert bool((counts == size).all()), f"groups have {counts.tolist()} columns, must have {size} each"
    order = torch.argsort(group, stable=True)
    return None if torch.equal(order, torch.arange(group.numel(), device=order.device)) else order


def make_linear(weight: Quantized, bias: Tensor | None) -> QuantLinear:
    """The fastest linear that this device has for the weight."""
    return GroupedLinear(weight, bias)
