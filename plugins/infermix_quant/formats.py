"""One quantized linear as tensors of a checkpoint, and back: GPTQ (v1, v2), AWQ GEMM, compressed-tensors.

Names are those behind the linear's own name. `N` outputs, `K` inputs, `G` groups of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from infermix.errors import UserError
from torch import Tensor

from infermix_quant.grid import Quantized
from infermix_quant.words import WORD, pack_awq, pack_rows, unpack_awq, unpack_rows

Tensors = Mapping[str, Tensor]


class Unsaveable(Exception):
    """The format cannot express this weight."""


def gptq_tensors(weight: Quantized, *, v2: bool) -> dict[str, Tensor]:
    """`qweight [K * bits / 32, N]`, `qzeros [G, N * bits / 32]` int32, `scales [G, N]`, `g_idx [K]` int32.

    The first version stores zero points minus one, so it has no zero point 0; version 2 stores them as they are.
    """
    _require(weight, rows=weight.q.shape[1], columns=weight.q.shape[0])
    zero = _zeros(weight)
    if not v2:
        if int(zero.min()) == 0:
            raise Unsaveable("GPTQ's first format has no zero point 0")
        zero = zero - 1
    return {
        "qweight": pack_rows(weight.q.t(), weight.bits),
        "qzeros": pack_rows(zero, weight.bits).t().contiguous(),
        "scales": _half(weight.scale).t().contiguous(),
        "g_idx": weight.groups().to(torch.int32),
    }


def read_gptq(tensors: Tensors, *, bits: int, v2: bool) -> Quantized:
    """The inverse of `gptq_tensors`; without `g_idx`, groups are equal runs of columns."""
    zero = unpack_rows(tensors["qzeros"].t().contiguous(), bits) + (0 if v2 else 1)
    return _quantized(
        unpack_rows(tensors["qweight"], bits).t(), tensors["scales"].t(), zero, bits, tensors.get("g_idx")
    )


def awq_tensors(weight: Quantized) -> dict[str, Tensor]:
    """`qweight [K, N / 8]`, `qzeros [G, N / 8]` int32 in the order 0 4 1 5 2 6 3 7, `scales [G, N]`."""
    if weight.bits != 4 or weight.group is not None or weight.q.shape[0] % 8:
        raise Unsaveable("AWQ's format holds 4 bits, groups of neighbours, and a multiple of 8 outputs")
    return {
        "qweight": pack_awq(weight.q.t()),
        "qzeros": pack_awq(_zeros(weight).t()),
        "scales": _half(weight.scale).t().contiguous(),
    }


def read_awq(tensors: Tensors) -> Quantized:
    zero = unpack_awq(tensors["qzeros"]).t()
    return _quantized(unpack_awq(tensors["qweight"]).t(), tensors["scales"].t(), zero, 4, None)


def packed_tensors(weight: Quantized) -> dict[str, Tensor]:
    """compressed-tensors `pack-quantized`: `weight_packed [N, K * bits / 32]` int32, `weight_scale [N, G]`,
    `weight_shape [2]`, where there are zero points `weight_zero_point [N * bits / 32, G]`, with act-order
    `weight_g_idx [K]`."""
    if weight.bits not in (4, 8):
        raise Unsaveable("pack-quantized holds 4 or 8 bits")
    _require(weight, rows=weight.q.shape[1], columns=weight.q.shape[0] if weight.zero is not None else WORD)
    tensors = {
        "weight_packed": pack_rows(weight.q.t(), weight.bits).t().contiguous(),
        "weight_scale": weight.scale.contiguous(),
        "weight_shape": torch.tensor(weight.q.shape),
    }
    if weight.zero is not None:
        tensors["weight_zero_point"] = pack_rows(_zeros(weight), weight.bits)
    if weight.group is not None:
        tensors["weight_g_idx"] = weight.group.to(torch.int32)
    return tensors


def read_packed(tensors: Tensors, *, bits: int) -> Quantized:
    zero = tensors.get("weight_zero_point")
    return _quantized(
        unpack_rows(tensors["weight_packed"].t().contiguous(), bits).t()[:, : int(tensors["weight_shape"][1])],
        tensors["weight_scale"],
        None if zero is None else unpack_rows(zero, bits),
        bits,
        tensors.get("weight_g_idx"),
    )


def _quantized(q: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: Tensor | None) -> Quantized:
    """Zero points in the middle of the range, and groups of neighbours, are left implicit."""
    if zero is not None and bool((zero == 2 ** (bits - 1)).all()):
        zero = None
    size = q.shape[1] // scale.shape[1]
    if group is not None and torch.equal(group.long(), torch.arange(q.shape[1], device=q.device) // size):
        group = None
    return Quantized(q.contiguous(), scale.contiguous(), None if zero is None else zero.contiguous(), bits, group)


def _zeros(weight: Quantized) -> Tensor:
    """`[N, G]` uint8."""
    if weight.zero is None:
        return torch.full_like(weight.scale, 2 ** (weight.bits - 1), dtype=torch.uint8)
    if weight.zero.is_floating_point():
        raise Unsaveable("zero points are no integers")
    return weight.zero


def _half(scale: Tensor) -> Tensor:
    """fp16, which every reader takes, where it holds the very same scales."""
    half = scale.to(torch.float16)
    return half if torch.equal(half.float(), scale.float()) else scale


def _require(weight: Quantized, *, rows: int, columns: int) -> None:
    if rows * weight.bits % WORD or columns * weight.bits % WORD:
        raise Unsaveable(f"{tuple(weight.q.shape)} weights of {weight.bits} bits do not fill whole words")


def check_widths(name: str, weight: Quantized, out_features: int, in_features: int) -> None:
    """Raises `UserError` when a checkpoint's tensors belong to a linear of another size."""
    if weight.q.shape != (out_features, in_features):
        raise UserError(
            f"{name} is {out_features} x {in_features} in the config and {weight.q.shape[0]} x {weight.q.shape[1]} "
            "in the packed weights",
            key="model.source",
        )
