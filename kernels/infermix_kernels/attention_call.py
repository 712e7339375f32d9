"""One call of attention as the launchers see it: tensors, rules, workspace, and a launch that is ready to run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels import attention_tile as tile
from infermix_kernels.attention_quantized import FP8, INT8, PLAIN
from infermix_kernels.launch import Launch, ShapeClass, converts_fp8, num_multiprocessors

#: Rows of the largest tile of the split kernel.
MAX_SPLIT_ROWS = 128
_FORMATS = {torch.int8: INT8.value, torch.float8_e4m3fn: FP8.value}


@dataclass(frozen=True, eq=False)
class Workspace:
    """Partial results of split contexts: `sums`, `stats`, fp32.

    One workspace serves any number of launches one after the other, captured or not; launches that may overlap
    (several streams) need one each.
    """

    sums: Tensor
    stats: Tensor

    @classmethod
    def allocate(cls, device: torch.device | str, num_elements: int = 1 << 22) -> Workspace:
        """Room for `num_elements` partial sums (fp32); a smaller workspace only means fewer splits."""
        return cls(
            sums=torch.empty(num_elements, dtype=torch.float32, device=device),
            stats=torch.empty(num_elements // 8, dtype=torch.float32, device=device),
        )

    def max_slots(self, block_rows: int, value_dim: int) -> int:
        return min(self.sums.numel() // (block_rows * value_dim), self.stats.numel() // (2 * block_rows))


@dataclass(frozen=True)
class Geometry:
    """How query rows are folded: tiles of `heads` query heads that share a KV head, `tokens` tokens each."""

    heads: int
    head_tiles: int
    tokens: int


def fold(num_heads: int, num_kv_heads: int, block_rows: int) -> Geometry:
    group = num_heads // num_kv_heads
    heads = next(size for size in range(min(group, block_rows), 0, -1) if group % size == 0)
    return Geometry(heads, num_heads // heads, block_rows // heads)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A kernel with everything that its launch takes."""

    kernel: Any
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    launch: Launch
    then: Prepared | None = None

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants)
        if self.then is not None:
            self.then.run()


@dataclass(frozen=True, slots=True)
class Rules:
    """What is computed besides softmax(q k) v. Raises `ValueError` for numbers that mean nothing."""

    scale: float
    window: int | None
    softcap: float | None
    tree_mask: Tensor | None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}, must be finite")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap is {self.softcap}, must be above 0 and finite, or None for none")

    def numbers(self) -> tuple[float, float, int]:
        """Score factor and softcap in base 2, window."""
        log2e = math.log2(math.e)
        return self.scale * log2e, (self.softcap or 1.0) * log2e, self.window or 0


def shares_values(keys: Tensor, values: Tensor) -> bool:
    """Whether values are the first numbers of the keys, in the same memory."""
    same = keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
    return same and not keys.is_meta and values.shape[3] < keys.shape[3]


@dataclass(frozen=True, slots=True)
class Call:
    """The tensors of one call."""

    q: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_tables: Tensor | None
    sinks: Tensor | None
    scales: tuple[Tensor | None, Tensor | None]
    #: Values are the first numbers of the keys, in the same memory.
    shared: bool = False

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.q, *self.pools(), *self.scales, self.out)

    def pools(self) -> tuple[Tensor, Tensor]:
        """Keys and values as the kernels read them: quantized ones as words of four dimensions."""
        if self.keys.dtype in _FORMATS:
            return self.keys.view(torch.int32), self.values.view(torch.int32)
        return self.keys, self.values

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.keys.shape[2]

    @property
    def rest(self) -> int:
        """Numbers of a key that are no part of its value."""
        return self.keys.shape[3] - self.values.shape[3]

    @property
    def block_size(self) -> int:
        return 0 if self.block_tables is None else self.keys.shape[1]

    def shape_class(self, kernel: str, rows: int, crowded: bool = True) -> ShapeClass:
        return ShapeClass(
            "latent" if self.shared else "split" if kernel == "split" else "prefill",
            self.q.element_size(),
            self.keys.element_size(),
            triton.next_power_of_2(self.keys.shape[3]),
            triton.next_power_of_2(self.values.shape[3]),
            rows,
            self.block_size,
            crowded,
            self.keys.dtype == torch.float8_e4m3fn,
        )

    def split_class(self, max_query_len: int, device: torch.device | None = None) -> ShapeClass:
        """The class of this call when its contexts are split on `device` (default: that of the tensors)."""
        rows = min(max(16, triton.next_power_of_2(max_query_len * self.group)), MAX_SPLIT_ROWS)
        units, _, _ = self.units(rows, max_query_len)
        return self.shape_class("split", rows, crowded=2 * units > num_multiprocessors(device or self.q.device))

    def units(self, block_rows: int, max_query_len: int) -> tuple[int, int, Geometry]:
        """Programs without a split, row tiles of a sequence, and how its rows are folded."""
        geometry = fold(self.q.shape[1], self.keys.shape[2], block_rows)
        row_tiles = -(-max_query_len // geometry.tokens)
        return self.num_seqs * row_tiles * geometry.head_tiles, row_tiles, geometry

    def strides(self) -> tuple[int, ...]:
        keys, values = self.pools()
        return (
            *self.q.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            *self.scale_strides(),
            0 if self.block_tables is None else self.block_tables.stride(0),
        )

    def scale_strides(self) -> tuple[int, int, int]:
        """From block to block (dense: row to row), token to token and head to head."""
        if self.scales[0] is None:
            return 0, 0, 0
        block, head, token = self.scales[0].stride()
        return block, token, head

    def constants(self, launch: Launch, geometry: Geometry, rules: Rules) -> dict[str, Any]:
        shape = self.shape_class("prefill", 0)
        narrowest = 64 if self.keys.dtype in _FORMATS else 16
        return {
            "GROUP": self.group,
            "HEADS": geometry.heads,
            "DK": self.keys.shape[3],
            "DV": self.values.shape[3],
            "PAD_K": max(narrowest, triton.next_power_of_2(self.rest) if self.shared else shape.key_dim),
            "PAD_V": max(narrowest, shape.value_dim),
            "BLOCK_M": launch.block_rows,
            "BLOCK_N": launch.block_tokens,
            "BLOCK_SIZE": self.block_size,
            "ADDRESSING": addressing(self.block_size, launch.block_tokens),
            "WINDOW": rules.window is not None,
            "SOFTCAP": rules.softcap is not None,
            "SINKS": self.sinks is not None,
            "FORMAT": _FORMATS.get(self.values.dtype, PLAIN.value),
            "COMPUTE": tl.float32 if self.q.dtype == torch.float32 else tl.float16,
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "NATIVE": not triton.knobs.runtime.interpret and converts_fp8(self.q.device),
            "WIDE": max(pool.shape[0] * pool.stride(0) for pool in self.pools()) >= 1 << 31,
            "SAME_STRIDES": self.keys.stride() == self.values.stride(),
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            **({"maxnreg": launch.max_registers} if launch.max_registers else {}),
        }


def addressing(block_size: int, block_tokens: int) -> int:
    """How a tile of `block_tokens` tokens lies in blocks of `block_size` (0: dense rows)."""
    if block_size == 0:
        return tile.DENSE.value
    if block_size % block_tokens == 0:
        return tile.TILE_IN_BLOCK.value
    return tile.BLOCKS_IN_TILE.value if block_tokens % block_size == 0 else tile.STRADDLING.value
