"""Measured launches of the matrix products: by kind of weight, shape and number of rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import triton

from infermix_kernels.matmul_launch import DotLaunch, ExpandLaunch, GemvLaunch, MatmulLaunch, RowLaunch
from infermix_kernels.measured import MeasuredTable

LinearLaunch = MatmulLaunch | GemvLaunch | DotLaunch | RowLaunch | ExpandLaunch

Family = Literal["skinny", "w4a16", "w8a16", "int8", "fp8"]
_KINDS: dict[str, type[Any]] = {
    "tile": MatmulLaunch,
    "gemv": GemvLaunch,
    "dot": DotLaunch,
    "row": RowLaunch,
    "expand": ExpandLaunch,
}


@dataclass(frozen=True)
class LinearShape:
    """What the launch of a linear depends on besides its number of rows.

    `group_size` is 0 where scales are per output feature; `element_bytes` are those of the activations.
    """

    family: Family
    out_features: int
    in_features: int
    group_size: int = 0
    zeros: bool = False
    element_bytes: int = 2

    def key(self, num_rows: int) -> str:
        groups = f" group{self.group_size}" if self.group_size else ""
        zeros = " zeros" if self.zeros else ""
        return (
            f"{self.family} x{self.element_bytes} {self.out_features}x{self.in_features}{groups}{zeros} "
            f"rows{rows_class(num_rows)}"
        )


def rows_class(num_rows: int) -> int:
    """Row counts share a launch up to the next power of two."""
    return int(triton.next_power_of_2(num_rows))


class MatmulTable:
    """Measured launches of one machine, read once from `directory/matmul-<machine>.json`."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._table = MeasuredTable(directory, "matmul", device)
        self._launches: dict[tuple[LinearShape, int], LinearLaunch | None] = {}

    @property
    def path(self) -> Path:
        return self._table.path

    def measured(self, shape: LinearShape, num_rows: int) -> bool:
        return shape.key(num_rows) in self._table

    def find(self, shape: LinearShape, num_rows: int) -> LinearLaunch | None:
        """The measured launch for so many rows, `None` when it was never measured."""
        wanted = shape, rows_class(num_rows)
        if wanted not in self._launches:
            entry = self._table.get(shape.key(num_rows))
            self._launches[wanted] = None if entry is None else _decoded(entry)
        return self._launches[wanted]

    def store(self, shape: LinearShape, num_rows: int, launch: LinearLaunch, seconds: float) -> None:
        self._launches[shape, rows_class(num_rows)] = launch
        kind = next(name for name, kind in _KINDS.items() if type(launch) is kind)
        self._table.store(shape.key(num_rows), {"kind": kind, **asdict(launch)}, seconds)


def _decoded(entry: dict[str, Any]) -> LinearLaunch:
    fields = {name: value for name, value in entry.items() if name != "kind"}
    launch: LinearLaunch = _KINDS[entry["kind"]](**fields)
    return launch
