"""One row of numbers per sequence, kept on the device in the engine's lanes."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain

import torch
from infermix.roles.request import Sequence
from torch import Tensor


class LaneRows:
    """`[max_num_seqs, width]`; a row is known from `note` to `forget`."""

    def __init__(self, max_num_seqs: int, width: int, device: torch.device | str, dtype: torch.dtype) -> None:
        self._rows = torch.zeros(max_num_seqs, width, device=device, dtype=dtype)
        self._known: set[int] = set()

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def known_of(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those of them that are known."""
        known = self._known
        return [sequence for sequence in sequences if sequence.seq_id in known]

    def note(self, sequences: Iterable[Sequence]) -> None:
        """These are known from now on: their rows are written."""
        self._known.update([sequence.seq_id for sequence in sequences])

    def write(self, lanes: Tensor, rows: Tensor) -> None:
        """`rows [n, width]` of lanes `[n]`, whoever they belong to."""
        self._rows.index_copy_(0, lanes, rows.to(self._rows.dtype))

    def take(self, lanes: Tensor) -> Tensor:
        """`[n, width]` of sequences that are known."""
        return self._rows.index_select(0, lanes)

    def like(self, num_rows: int) -> Tensor:
        """`[num_rows, width]` zeros beside them, of the same kind."""
        return self._rows.new_zeros(num_rows, self._rows.shape[1])

    def forget(self, sequence: Sequence) -> None:
        self._known.discard(sequence.seq_id)


def to_device(values: Seq[int], device: torch.device) -> Tensor:
    """int64, without waiting for the device."""
    return on_host(values, device).to(device, non_blocking=True)


def on_host(values: Seq[int], device: torch.device) -> Tensor:
    """int64, ready to be copied to the device without waiting. NumPy reads a list three times as fast as PyTorch."""
    made = torch.empty(len(values), dtype=torch.int64, pin_memory=device.type == "cuda")
    made.numpy()[:] = values
    return made


def lanes_of(sequences: Seq[Sequence]) -> list[int]:
    return [sequence.lane for sequence in sequences]


def lists_to_device(device: torch.device, *lists: Seq[int]) -> Seq[Tensor]:
    """Each of the lists as int64 on the device, in one copy."""
    return to_device(list(chain.from_iterable(lists)), device).split([len(each) for each in lists])
