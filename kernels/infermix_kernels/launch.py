"""Launch parameters of the attention kernels: defaults by shape class, measured ones from a file per machine.

Nothing is ever measured inside an ordinary call: `infermix_kernels.tune` is called on its own, and its result is
looked up later in a `LaunchTable` that the caller hands in.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from infermix_kernels.measured import MeasuredTable, num_multiprocessors

__all__ = [
    "Launch",
    "LaunchTable",
    "ShapeClass",
    "axes",
    "converts_fp8",
    "default_launch",
    "fits",
    "num_multiprocessors",
    "overlaps_launches",
]

#: Shared memory that one program may use on the smallest device with tensor-core tiles of this size.
_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class Launch:
    """Tile of query rows and of tokens, warps and pipeline stages of a program.

    `programs_per_sm` is how many programs the split of a context aims at per multiprocessor; the prefill kernel has
    no use for it. `max_registers` bounds the registers of a thread (0: the compiler's choice), so that more programs
    share a multiprocessor. `described` lets the copy engine read tiles that lie within one block (prefill only).
    """

    block_rows: int
    block_tokens: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 4
    max_registers: int = 0
    described: bool = False


@dataclass(frozen=True)
class ShapeClass:
    """What launch parameters depend on. Head dimensions are padded to powers of two, `rows` too; sizes in bytes.

    `crowded` says that without a split there would be a program for every second multiprocessor at least.
    """

    kernel: Literal["split", "prefill", "latent"]
    element_bytes: int
    kv_bytes: int
    key_dim: int
    value_dim: int
    rows: int
    block_size: int
    crowded: bool = True
    fp8: bool = False

    @property
    def key(self) -> str:
        return (
            f"{self.kernel} q{self.element_bytes} kv{self.kv_bytes}{' fp8' if self.fp8 else ''} "
            f"dim{self.key_dim}x{self.value_dim} rows{self.rows} block{self.block_size}"
            f"{'' if self.crowded else ' few'}"
        )


#: Decode of many sequences over int8 and fp8 pools on an H200, by the least tokens in a block, largest first. Four
#: programs a multiprocessor instead of as many as fit; int8, B=64, ctx 8192: 1.84 times bf16 with blocks of 64
#: (1.78 under a limit of 200 registers), 1.83 with blocks of 16 (1.78 without the limit).
_CROWDED_EIGHT_BITS = ((64, Launch(16, 64, 2, 3, 4)), (0, Launch(16, 64, 2, 3, 4, 200)))


def default_launch(shape: ShapeClass) -> Launch:
    """Parameters that fit any device with 227 KB of shared memory, good on an H200."""
    widest = max(shape.key_dim, shape.value_dim)
    if shape.kernel == "latent":
        return _default_latent(shape)
    if shape.element_bytes == 4:
        return Launch(min(shape.rows, 32), 32, 4, 2)
    if shape.kernel == "split":
        return _default_split(shape, widest)
    if shape.kv_bytes == 1:
        return Launch(128, 64, 8, 3 if widest <= 128 else 2)
    if widest > 128:
        return Launch(128, 64, 8, 2)
    if widest <= 64:
        return Launch(128, 64, 4, 3)
    described = shape.block_size % 64 == 0
    return Launch(128, 64, 8, 2, max_registers=128, described=described)


def _default_split(shape: ShapeClass, widest: int) -> Launch:
    """Enough tiles in flight to cover the latency of memory, enough programs to keep every multiprocessor busy."""
    if shape.kv_bytes == 1:
        return _default_quantized(shape)
    if widest > 128:
        return Launch(shape.rows, 32, 4, 3, 2)
    if shape.rows > 16:
        return Launch(shape.rows, 64, 8 if shape.rows >= 128 else 4, 3, 2)
    if widest <= 64:
        return Launch(shape.rows, 128, 4, 2, 4)
    return Launch(shape.rows, 64, 4, 4, 2) if shape.crowded else Launch(shape.rows, 128, 8, 3, 1)


def _default_latent(shape: ShapeClass) -> Launch:
    """Accumulators of up to 512 numbers a row: few rows a program, or twice the threads."""
    if shape.element_bytes == 4:
        return Launch(16, 16, 4, 2, 2)
    if shape.rows <= 32:
        return Launch(shape.rows, 32, 4, 2, 2)
    return Launch(64, 32, 8, 3, 1)


def _default_quantized(shape: ShapeClass) -> Launch:
    if shape.rows > 16:
        return Launch(shape.rows, 64, 4, 3, 2)
    if not shape.crowded:
        return Launch(16, 128, 4, 3, 2)
    return next(launch for least, launch in _CROWDED_EIGHT_BITS if shape.block_size >= least)


def fits(shape: ShapeClass, launch: Launch) -> bool:
    """Whether the tiles of a launch fit into shared memory."""
    key_dim, both = shape.key_dim, shape.key_dim + shape.value_dim
    if shape.kernel == "latent":  # one row in place of both, a quarter wider than its value at most
        key_dim = both = shape.value_dim * 5 // 4
    per_token = shape.kv_bytes * both
    queries = launch.block_rows * key_dim * shape.element_bytes
    return launch.block_tokens * per_token * launch.num_stages + queries <= _SHARED_BYTES


def axes(shape: ShapeClass) -> dict[str, tuple[Any, ...]]:
    """What tuning varies, one parameter after the other."""
    varied: dict[str, tuple[Any, ...]] = {
        "block_tokens": (32, 64, 128),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4, 5),
    }
    if shape.kernel == "latent":
        return {"block_rows": (16, 32, 64), **varied, "programs_per_sm": (1, 2, 4)}
    if shape.kernel == "split":
        limits = {"max_registers": (0, 128, 168, 200)} if shape.kv_bytes == 1 else {}
        return {**varied, **limits, "programs_per_sm": (1, 2, 4, 8, 16)}
    if shape.kv_bytes == 2:
        varied["described"] = (False, True)
    return {"block_rows": (64, 128), **varied, "max_registers": (0, 128)}


@cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one that it depends on drains (compute capability 9.0)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def converts_fp8(device: torch.device) -> bool:
    """Whether the device has instructions for e4m3 (compute capability 8.9); assumed when compiling for none."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


class LaunchTable:
    """Measured launch parameters of attention on one machine, read once from `directory/attention-<machine>.json`."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._table = MeasuredTable(directory, "attention", device)
        self._launches: dict[ShapeClass, Launch] = {}

    @property
    def path(self) -> Path:
        return self._table.path

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, shape: ShapeClass) -> bool:
        """Whether the class was measured."""
        return shape.key in self._table

    def find(self, shape: ShapeClass) -> Launch:
        """The measured parameters of a shape class, its defaults when it was never measured."""
        launch = self._launches.get(shape)
        if launch is None:
            entry = self._table.get(shape.key)
            launch = default_launch(shape) if entry is None else Launch(**entry)
            self._launches[shape] = launch
        return launch

    def store(self, shape: ShapeClass, launch: Launch, seconds: float) -> None:
        """Remember the best parameters and their time."""
        self._launches[shape] = launch
        self._table.store(shape.key, asdict(launch), seconds)
