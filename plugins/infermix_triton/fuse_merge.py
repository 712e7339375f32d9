"""Several linears over the same input as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def merge_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One plain `nn.Linear` with all their rows; the given ones become views of it: no weight is held twice."""
    if len(linears) == 1:
        return linears[0]
    first = linears[0]
    sizes = [linear.out_features for linear in linears]
    merged = nn.Linear(first.in_features, sum(sizes), bias=False, device="meta", dtype=first.weight.dtype)
    merged.weight = _frozen(torch.cat([linear.weight.detach() for linear in linears]))
    bias = _bias(linears)
    merged.register_parameter("bias", None if bias is None else _frozen(bias))
    for linear, rows in zip(linears, merged.weight.split(sizes), strict=True):
        linear.weight = _frozen(rows)
    return merged.requires_grad_(False)


def mergeable(linears: Sequence[nn.Linear]) -> bool:
    first = linears[0].weight
    return all(
        (linear.in_features, linear.weight.dtype, linear.weight.device)
        == (linears[0].in_features, first.dtype, first.device)
        for linear in linears
    )


def _bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    """Linears without a bias count as having zeros when others have one."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
