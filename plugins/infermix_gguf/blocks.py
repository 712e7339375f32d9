"""What the blocks of GGUF files are worth, in PyTorch, bit for bit as the package `gguf` expands them.

A row of a matrix is cut into blocks of 32 or 256 weights; a block is a record of bytes: scales in fp16, scales of
sub-blocks in 4 or 6 bits, and the weights' bits in planes. Layouts after ggml's `block_*` structures
(https://github.com/ggml-org/ggml, src/ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Weights of a block, and its bytes.
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip


def expand(rows: Tensor, kind: str) -> Tensor:
    """`rows [N, bytes]` uint8 of whole blocks -> fp32 `[N, weights]`."""
    _, size = BLOCKS[kind]
    blocks = rows.reshape(-1, size)
    return _EXPAND[kind](blocks).reshape(rows.shape[0], -1)


def _half(raw: Tensor) -> Tensor:
    """`[B, 2]` bytes -> fp32 `[B, 1]`."""
    return raw.contiguous().view(torch.float16).float()


def _planes(raw: Tensor, width: int, per_run: int) -> Tensor:
    """`[B, n]` bytes -> `[B, n * 8 / width]`: run by run of `per_run` bytes, each plane by plane, low bits first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=raw.device)
    runs = raw.unflatten(1, (-1, 1, per_run)) >> shifts[:, None]
    return (runs & (2**width - 1)).flatten(1)


def _bits(raw: Tensor) -> Tensor:
    """`[B, n]` bytes -> `[B, 8 n]` bits, low ones first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw[:, :, None] >> shifts) & 1).flatten(1)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_planes(b[:, 2:], 4, 16).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _planes(b[:, 4:], 4, 16).float() + _half(b[:, 2:4])


def _five(high: Tensor, low: Tensor) -> Tensor:
    return (_planes(low, 4, 16) | (_bits(high) << 4)).float()


def _q5_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_five(b[:, 2:6], b[:, 6:]) - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _five(b[:, 4:8], b[:, 8:]) + _half(b[:, 2:4])


def _q8_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * b[:, 2:].contiguous().view(torch.int8).float()


def _grouped(scale: Tensor, q: Tensor, offset: Tensor | None = None) -> Tensor:
    """`scale [B, G]` times `q [B, 256]` minus `offset [B, G]`, group by group."""
    weights = scale[:, :, None] * q.float().unflatten(1, (scale.shape[1], -1))
    return (weights if offset is None else weights - offset[:, :, None]).flatten(1)


def _q2_k(b: Tensor) -> Tensor:
    scales, q = b[:, :16], _planes(b[:, 16:80], 2, 32)
    scale = _half(b[:, 80:82]) * (scales & 15).float()
    return _grouped(scale, q, _half(b[:, 82:84]) * (scales >> 4).float())


def _q3_k(b: Tensor) -> Tensor:
    """The third bit of a weight is inverted: where it is 0, four is taken off."""
    third = _planes(b[:, :32], 1, 32).to(torch.int8)
    q = _planes(b[:, 32:96], 2, 32).to(torch.int8) - 4 * (1 - third)
    low, high = _planes(b[:, 96:104], 4, 8), _planes(b[:, 104:108], 2, 4)
    scales = (low | (high << 4)).to(torch.int8) - 32
    return _grouped(_half(b[:, 108:110]) * scales.float(), q)


def _six_bit_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> eight scales and eight minima of 6 bits.

    The first four of each lie in the low bits of bytes 0 ... 3 and 4 ... 7; of the others, the nibbles of bytes
    8 ... 11 are the low bits, and the top bits of the bytes before are the high ones.
    """
    first, second, nibbles = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scale = torch.cat(((first & 63), (nibbles & 15) | ((first >> 6) << 4)), dim=1)
    minimum = torch.cat(((second & 63), (nibbles >> 4) | ((second >> 6) << 4)), dim=1)
    return scale.float(), minimum.float()


def _q4_k(b: Tensor) -> Tensor:
    scale, minimum = _six_bit_scales(b[:, 4:16])
    return _grouped(_half(b[:, :2]) * scale, _planes(b[:, 16:], 4, 32), _half(b[:, 2:4]) * minimum)


def _q5_k(b: Tensor) -> Tensor:
    scale, minimum = _six_bit_scales(b[:, 4:16])
    q = _planes(b[:, 48:], 4, 32) | (_planes(b[:, 16:48], 1, 32) << 4)
    return _grouped(_half(b[:, :2]) * scale, q, _half(b[:, 2:4]) * minimum)


def _q6_k(b: Tensor) -> Tensor:
    low, high = _planes(b[:, :128], 4, 64), _planes(b[:, 128:192], 2, 32)
    q = (low | (high << 4)).to(torch.int8) - 32
    scales = b[:, 192:208].contiguous().view(torch.int8).float()
    return _grouped(_half(b[:, 208:210]) * scales, q)


_EXPAND: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
