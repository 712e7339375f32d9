"""Integers of a few bits in 32-bit words, as checkpoints of GPTQ, AWQ and compressed-tensors hold them."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32
#: Nibble i of a word of an AWQ (GEMM) checkpoint holds output feature `AWQ_FEATURES[i]` of eight.
AWQ_FEATURES = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """`[R, C]` below `2 ** bits` -> int32 `[R * bits / 32, C]`: one stream of bits down a column, low bits first.

    With 2, 4 and 8 bits a word holds 16, 8 or 4 whole rows; with 3 bits, 32 rows share three words. `R * bits` must
    be a multiple of 32.
    """
    rows, columns = values.shape
    assert rows * bits % WORD == 0
    shifts = torch.arange(bits, device=values.device, dtype=torch.uint8)
    stream = ((values.to(torch.uint8)[:, None] >> shifts[:, None]) & 1).reshape(-1, WORD, columns)
    words = torch.zeros(stream.shape[0], columns, dtype=torch.int32, device=values.device)
    for bit in range(WORD):
        words |= stream[:, bit].to(torch.int32) << bit
    return words


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_rows`, uint8."""
    places = torch.arange(WORD, device=words.device, dtype=torch.int32)
    stream = ((words[:, None] >> places[:, None]) & 1).to(torch.uint8)
    stream = stream.reshape(-1, bits, words.shape[1])
    values = stream[:, 0].clone()
    for bit in range(1, bits):
        values |= stream[:, bit] << bit
    return values


def pack_awq(values: Tensor) -> Tensor:
    """`[R, C]` below 16 -> int32 `[R, C / 8]`, eight columns to a word in AWQ's order."""
    order = torch.tensor(AWQ_FEATURES, device=values.device)
    return pack_rows(values.unflatten(1, (-1, 8))[:, :, order].flatten(1).t(), 4).t().contiguous()


def unpack_awq(words: Tensor) -> Tensor:
    """The inverse of `pack_awq`, uint8."""
    order = torch.tensor(AWQ_FEATURES, device=words.device)
    values = unpack_rows(words.t(), 4).t().unflatten(1, (-1, 8))
    return values[:, :, torch.argsort(order)].flatten(1).contiguous()
