"""One row of numbers per sequence, kept on the device in the engine's lanes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from infermix.roles.request import Sequence
from torch import Tensor


class LaneRows:
    """`[max_num_seqs, width]`; a row is known from `put` to `forget`."""

    def __init__(self, max_num_seqs: int, width: int, device: torch.device | str, dtype: torch.dtype) -> None:
        self._rows = torch.zeros(max_num_seqs, width, device=device, dtype=dtype)
        self._known: set[int] = set()

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def knows(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._known

    def put(self, sequences: Seq[Sequence], rows: Tensor) -> None:
        """`rows [n, width]`."""
        self._known.update(sequence.seq_id for sequence in sequences)
        self._rows.index_copy_(0, self._lanes(sequences), rows.to(self._rows.dtype))

    def take(self, sequences: Seq[Sequence]) -> Tensor:
        """`[n, width]` of sequences that are known."""
        return self._rows.index_select(0, self._lanes(sequences))

    def forget(self, sequence: Sequence) -> None:
        self._known.discard(sequence.seq_id)

    def _lanes(self, sequences: Seq[Sequence]) -> Tensor:
        return to_device([sequence.lane for sequence in sequences], self._rows.device)


def to_device(values: Seq[int], device: torch.device) -> Tensor:
    """int64, without waiting for the device."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
