"""Blocks as rows of bytes: what swapping and hand-over copy, whatever a layout keeps in a block."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from infermix.errors import Unsupported

#: Widest first: fewer, wider elements copy faster.
_UNITS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class BlockRows:
    """Row i holds block i of every tensor, one after the other. `width` counts elements of `unit`.

    Raises `Unsupported` for a tensor that is not contiguous: its blocks cannot be addressed as bytes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        for tensor in self.tensors:
            if not tensor.is_contiguous():
                raise Unsupported(f"a tensor of blocks {tuple(tensor.shape)} has gaps: strides {tensor.stride()}")
        sizes = [tensor[0].numel() * tensor.element_size() for tensor in self.tensors]
        offsets = [tensor.storage_offset() * tensor.element_size() for tensor in self.tensors]
        self.unit = next(unit for unit in _UNITS if not any(n % unit.itemsize for n in (*sizes, *offsets)))
        self._flat = [tensor.view(tensor.shape[0], -1).view(self.unit) for tensor in self.tensors]
        edges = [0]
        for flat in self._flat:
            edges.append(edges[-1] + flat.shape[1])
        self._columns = [slice(*pair) for pair in itertools.pairwise(edges)]
        self.width = edges[-1]

    @property
    def block_bytes(self) -> int:
        return self.width * self.unit.itemsize

    def gather(self, blocks: Tensor, out: Tensor) -> None:
        """Copy blocks (int64, on the tensors' device) to the rows of `out [n, width]`."""
        for flat, columns in zip(self._flat, self._columns, strict=True):
            out[:, columns].copy_(flat.index_select(0, blocks))

    def scatter(self, blocks: Tensor, rows: Tensor) -> None:
        """Copy the rows of `rows [n, width]` to blocks (int64, on the tensors' device)."""
        for flat, columns in zip(self._flat, self._columns, strict=True):
            flat.index_copy_(0, blocks, rows[:, columns])


def runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """`(offset, first, count)` of the stretches of consecutive ids in `blocks`; `offset` counts inside `blocks`."""
    found: list[tuple[int, int, int]] = []
    for index, block in enumerate(blocks):
        if found and block == found[-1][1] + found[-1][2]:
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((index, block, 1))
    return found
