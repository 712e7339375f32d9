"""The arrays of a captured step: pinned host stages that are filled in turn, and their one copy on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

#: How many steps may be in preparation at once: the one that runs, the one being queued, one spare.
_STAGES = 3
#: Fields start at multiples of this, which kernels specialise on.
_ALIGNED_BYTES = 16

#: Name, numpy type (int64 or int32) and shape of one array.
FieldSpec = tuple[str, Any, tuple[int, ...]]


@dataclass(frozen=True)
class _Field:
    name: str
    dtype: Any
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def _placed(specs: Sequence[FieldSpec]) -> list[_Field]:
    fields, offset = [], 0
    for name, dtype, shape in specs:
        field = _Field(name, dtype, shape, offset)
        fields.append(field)
        offset += -(-field.num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return fields


class StagedFields:
    """Arrays of fixed shapes behind one pinned buffer per stage and one device buffer, copied in one piece.

    `device` holds the persistent tensors by name. A step takes the next `stage()`, fills it, and `send`s it.
    """

    def __init__(self, specs: Sequence[FieldSpec], device: torch.device) -> None:
        fields = _placed(specs)
        total = fields[-1].offset + fields[-1].num_bytes
        pinned = device.type == "cuda"
        self._stages = [torch.empty(total, dtype=torch.uint8, pin_memory=pinned) for _ in range(_STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(_STAGES)] if pinned else []
        self.stages = [
            {f.name: np.ndarray(f.shape, f.dtype, stage.numpy(), f.offset) for f in fields} for stage in self._stages
        ]
        self._device_bytes = torch.empty(total, dtype=torch.uint8, device=device)
        self.device = {f.name: self._device_view(f) for f in fields}
        self._turn = 0

    def _device_view(self, field: _Field) -> Tensor:
        dtype = torch.int64 if field.dtype is np.int64 else torch.int32
        return self._device_bytes[field.offset : field.offset + field.num_bytes].view(dtype).view(field.shape)

    def stage(self) -> dict[str, np.ndarray]:
        """The next stage's arrays, free to be written: its last copy is over."""
        self._turn = (self._turn + 1) % _STAGES
        if self._copied:
            self._copied[self._turn].synchronize()  # done long ago unless a decoder launches many steps unread
        return self.stages[self._turn]

    def send(self) -> None:
        """Queue the copy of the stage taken last to the device."""
        self._device_bytes.copy_(self._stages[self._turn], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
