"""Linears with weights packed once for oneDNN, for decoding on a CPU.

`torch.nn.functional.linear` repacks (or streams a poorly laid out) weight at every call; with one row that is most
of the time. This uses the private operators that `torch.compile` uses for frozen weights, so it is an option that
has to be asked for, and it is checked on every weight before it replaces anything.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from infermix.errors import Unsupported

#: Rows that the packed layout is tuned for; any number of rows is computed correctly.
_TUNED_ROWS = 8


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed copy of its weight; the plain weight is let go unless another module shares it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TUNED_ROWS)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        out = torch.ops.mkldnn._linear_pointwise(flat, self.packed, self.bias, "none", [], "")
        return out.view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module) -> dict[str, int]:
    """Replace every `nn.Linear` of a CPU model in place.

    Returns {"linears": count, "packed_bytes": bytes of the packed copies}. Raises `Unsupported` when this torch
    lacks the operators, the model is not on the CPU, or a packed product differs from the plain one.
    """
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        raise Unsupported(f"torch {torch.__version__} has no packed oneDNN linear; use linears: torch")
    count = packed_bytes = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            setattr(parent, name, _checked(child))
            count += 1
            packed_bytes += child.weight.numel() * child.weight.element_size()
    return {"linears": count, "packed_bytes": packed_bytes}


def _checked(linear: nn.Linear) -> PackedLinear:
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"packed linears need float32 or bfloat16 on cpu, not {weight.dtype} on {weight.device}")
    packed = PackedLinear(linear)
    x = torch.randn(2, linear.in_features, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    expected, got = linear(x).double(), packed(x).double()
    error = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
    # Two summation orders of in_features products: one rounding of the result in bf16, some units in fp32.
    if not error < (1e-2 if weight.dtype is torch.bfloat16 else 1e-5):
        raise Unsupported(f"a packed {tuple(weight.shape)} product differs from the plain one by {error:.2e}")
    return packed
