"""Integers of 1 to 8 bits in bytes, without a bit to spare."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Widths that fill a byte, by which a width is composed: 3 bits are 2 and 1.
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def pack_columns(q: Tensor, bits: int) -> Tensor:
    """`q [N, K]` uint8 below `2 ** bits` (2, 3, 4 or 8) -> uint8 `[N, about K * bits / 8]`.

    A plane of width w packs `8 / w` columns in a byte, which lie `ceil(K * w / 8)` apart; planes follow one another.
    """
    planes, shift = [], 0
    for width in _PLANES[bits]:
        planes.append(_pack_plane((q >> shift) & (2**width - 1), width))
        shift += width
    return torch.cat(planes, dim=1)


def unpack_columns(packed: Tensor, bits: int, num_columns: int) -> Tensor:
    """The inverse of `pack_columns`."""
    q, shift, start = torch.zeros((), dtype=torch.uint8, device=packed.device), 0, 0
    for width in _PLANES[bits]:
        size = -(-num_columns * width // 8)
        plane = _unpack_plane(packed[:, start : start + size], width)[:, :num_columns]
        q = q | (plane << shift)
        shift, start = shift + width, start + size
    return q


def _pack_plane(part: Tensor, width: int) -> Tensor:
    per_byte = 8 // width
    size = -(-part.shape[1] // per_byte)
    columns = F.pad(part, (0, size * per_byte - part.shape[1])).view(part.shape[0], per_byte, size)
    packed = columns[:, 0]
    for index in range(1, per_byte):
        packed = packed | (columns[:, index] << (width * index))
    return packed.contiguous()


def _unpack_plane(packed: Tensor, width: int) -> Tensor:
    if width == 8:
        return packed
    return torch.cat([(packed >> shift) & (2**width - 1) for shift in range(0, 8, width)], dim=1)
