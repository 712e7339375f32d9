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

    Tensors that lie evenly spaced in one allocation move together. Raises `Unsupported` for a tensor that is not
    contiguous: its blocks cannot be addressed as bytes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        for tensor in self.tensors:
            if not tensor.is_contiguous():
                raise Unsupported(f"a tensor of blocks {tuple(tensor.shape)} has gaps: strides {tensor.stride()}")
        sizes = [tensor[0].numel() * tensor.element_size() for tensor in self.tensors]
        offsets = [tensor.storage_offset() * tensor.element_size() for tensor in self.tensors]
        self.unit = next(unit for unit in _UNITS if not any(n % unit.itemsize for n in (*sizes, *offsets)))
        flat = [tensor.view(tensor.shape[0], -1).view(self.unit) for tensor in self.tensors]
        self._slabs = [_slab(members) for members in _neighbours(flat)]
        edges = [0, *itertools.accumulate(slab.shape[0] * slab.shape[2] for slab in self._slabs)]
        self._columns = [slice(*pair) for pair in itertools.pairwise(edges)]
        self.width = edges[-1]

    @property
    def block_bytes(self) -> int:
        return self.width * self.unit.itemsize

    def gather(self, blocks: Tensor, out: Tensor) -> None:
        """Copy blocks (int64, on the tensors' device) to the rows of `out [n, width]`."""
        for slab, columns in zip(self._slabs, self._columns, strict=True):
            self._split(out[:, columns], slab).copy_(slab.index_select(1, blocks))

    def scatter(self, blocks: Tensor, rows: Tensor) -> None:
        """Copy the rows of `rows [n, width]` to blocks (int64, on the tensors' device)."""
        for slab, columns in zip(self._slabs, self._columns, strict=True):
            slab.index_copy_(1, blocks, self._split(rows[:, columns], slab))

    @staticmethod
    def _split(rows: Tensor, slab: Tensor) -> Tensor:
        """`rows [n, T * w]` as `[T, n, w]`, no copy."""
        return rows.unflatten(1, (slab.shape[0], slab.shape[2])).transpose(0, 1)


def _neighbours(flat: Sequence[Tensor]) -> list[list[Tensor]]:
    """Successive tensors `[N, w]` of one shape at equal distances in one storage, together."""
    found: list[list[Tensor]] = []
    for tensor in flat:
        if found and _continues(found[-1], tensor):
            found[-1].append(tensor)
        else:
            found.append([tensor])
    return found


def _continues(members: Sequence[Tensor], tensor: Tensor) -> bool:
    last = members[-1]
    if tensor.shape != last.shape or tensor.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return False
    step = tensor.storage_offset() - last.storage_offset()
    first_step = members[1].storage_offset() - members[0].storage_offset() if len(members) > 1 else step
    return step == first_step >= last.numel()


def _slab(members: Sequence[Tensor]) -> Tensor:
    """One view `[T, N, w]` of all members."""
    first = members[0]
    step = members[1].storage_offset() - first.storage_offset() if len(members) > 1 else first.numel()
    return first.as_strided((len(members), *first.shape), (step, *first.stride()), first.storage_offset())


def runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """`(offset, first, count)` of the stretches of consecutive ids in `blocks`; `offset` counts inside `blocks`."""
    found: list[tuple[int, int, int]] = []
    for index, block in enumerate(blocks):
        if found and block == found[-1][1] + found[-1][2]:
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((index, block, 1))
    return found
