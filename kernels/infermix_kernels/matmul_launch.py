"""Launches, splits and scratch memory of the matrix products."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from infermix_kernels.checks import require


@dataclass(frozen=True)
class MatmulLaunch:
    """A program computes `block_m` rows of x times `block_n` rows of the weight, `block_k` columns a step.

    `split_k` programs share a tile and its columns. `swap` makes the weight the left operand of the tensor cores,
    whose height is 16 or 64, so that few rows of x do not waste them. With `descriptors`, tiles are fetched by the
    tensor memory accelerator (compute capability 9.0), unswapped and unsplit. Of 4-bit weights, `planes` (1, 2, 4)
    make one operand of the tensor cores.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    group_m: int = 8
    swap: bool = True
    descriptors: bool = False
    planes: int = 1

    def num_tiles(self, rows: int, columns: int) -> int:
        return triton.cdiv(rows, self.block_m) * triton.cdiv(columns, self.block_n)


@dataclass(frozen=True)
class GemvLaunch:
    """One row of 16 or 32 bits: a program computes `block_n` output features, `block_k` columns a step."""

    block_n: int = 1
    block_k: int = 1024
    num_warps: int = 4


@dataclass(frozen=True)
class DotLaunch:
    """One row of int8: a program computes `block_n` output features, `4 * block_words` columns a step."""

    block_n: int = 4
    block_words: int = 512
    num_warps: int = 4


@dataclass(frozen=True)
class RowLaunch:
    """One row, quantized by every program for itself: `block_n` output features, `4 * block_words` columns a step."""

    block_n: int = 8
    block_words: int = 512
    num_warps: int = 4


@dataclass(frozen=True)
class ExpandLaunch:
    """4-bit weights are expanded to 16 bits, then multiplied by cuBLAS."""


@dataclass(frozen=True)
class MatmulWorkspace:
    """Partial products of split columns: `partial` 32-bit, `counters` int32, zero between launches.

    One workspace serves any number of launches one after the other, captured or not; launches that may overlap
    (several streams) need one each.
    """

    partial: Tensor
    counters: Tensor

    @classmethod
    def allocate(cls, device: torch.device | str, num_elements: int = 1 << 23) -> MatmulWorkspace:
        """Room for `num_elements` partial sums of 4 bytes; what does not fit is not split."""
        return cls(
            partial=torch.empty(num_elements, dtype=torch.float32, device=device),
            counters=torch.zeros(4096, dtype=torch.int32, device=device),
        )

    def fits(self, launch: MatmulLaunch, rows: int, columns: int) -> bool:
        num_tiles = launch.num_tiles(rows, columns)
        size = num_tiles * launch.split_k * launch.block_m * launch.block_n
        return num_tiles <= self.counters.numel() and size <= self.partial.numel()


def launch_for_fp32(launch: MatmulLaunch, columns_step: int = 64) -> MatmulLaunch:
    """A small tile for 32-bit operands, which meet on no tensor core and take twice the room."""
    step = min(launch.block_k, columns_step)
    stages = 2 if step <= 64 else 1
    return replace(launch, block_m=16, block_n=32, block_k=step, num_warps=4, num_stages=stages, swap=True)


def usable_split(launch: MatmulLaunch, workspace: MatmulWorkspace | None, rows: int, columns: int) -> int:
    """The launch's split, or 1 when there is no workspace that holds it."""
    if launch.split_k == 1 or workspace is None or not workspace.fits(launch, rows, columns):
        return 1
    return launch.split_k


def check_matrix(x: Tensor, out_features: int, in_features: int) -> None:
    require(x.dim() == 2, f"x has {x.dim()} dimensions, must have 2")
    require(x.shape[1] == in_features, f"x has {x.shape[1]} columns, the weight {in_features}")
    require(x.shape[1] <= 1 or x.stride(1) == 1, "x must be contiguous in its last dimension")
    require(out_features > 0 and in_features > 0, "the weight is empty")


def split_for(num_tiles: int, num_steps: int, programs: int, most: int = 8) -> int:
    """Programs per tile so that about `programs` run, each with at least two of `num_steps`; a power of two."""
    wanted = min(most, programs // max(num_tiles, 1), num_steps // 2)
    return 1 << (max(wanted, 1).bit_length() - 1)
