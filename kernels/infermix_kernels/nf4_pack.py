"""4-bit codes of a table of 16 values, with a scale per block of columns, as the NF4 kernels read them.

Codes lie in words as those of W4A16 do (`infermix_kernels.pack`); scales stay as they are stored, one row of blocks
after another, so that a program that walks along a row reads neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infermix_kernels.checks import require, require_device, require_shape, require_vector
from infermix_kernels.pack import pack_words, unpack_words

#: The smallest block: half of the 32 columns that a nibble of neighbouring words covers.
SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class PackedNf4:
    """`weight = table[code] * scale`, a scale for each `block_size` columns of a row.

    `words [N, runs * 32]` int32. `absmax` holds the scales, fp32 `[N * blocks]`, row after row. With `scale_block` it
    is int8, of a multiple of `scale_block` elements, and scale i is `absmax[i] * absmax_scale[i // scale_block] +
    absmax_mean`, both fp32, the mean a scalar. `tables` are the 16 values in fp32, fp16 and bfloat16.
    """

    words: Tensor
    absmax: Tensor
    absmax_scale: Tensor | None
    absmax_mean: Tensor | None
    tables: tuple[Tensor, Tensor, Tensor]
    in_features: int
    block_size: int
    scale_block: int = 0

    @property
    def out_features(self) -> int:
        return int(self.words.shape[0])

    @property
    def blocks(self) -> int:
        """Of a row."""
        return self.in_features // self.block_size

    def table(self, dtype: torch.dtype) -> Tensor:
        """The 16 values, rounded to a dtype that the kernels know."""
        return next(table for table in self.tables if table.dtype == dtype)

    def scales(self) -> Tensor:
        """fp32 `[N, blocks]`."""
        scales = self.absmax.float()
        if self.absmax_scale is not None and self.absmax_mean is not None:
            each = torch.arange(scales.numel(), device=scales.device) // self.scale_block
            scales = scales * self.absmax_scale[each] + self.absmax_mean
        return scales[: self.out_features * self.blocks].view(self.out_features, self.blocks)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[N, K]`."""
        codes = unpack_words(self.words, self.in_features)
        values = self.tables[0].index_select(0, codes.flatten().int()).view(self.out_features, self.blocks, -1)
        return (values * self.scales()[:, :, None]).to(dtype).view(self.out_features, self.in_features)


def fits(in_features: int, block_size: int) -> bool:
    """Whether the kernels read such blocks: a power of two from 16 up that divides a row."""
    power = block_size >= SMALLEST_BLOCK and block_size & (block_size - 1) == 0
    return power and in_features % block_size == 0


def pack_nf4(
    codes: Tensor,
    absmax: Tensor,
    table: Tensor,
    *,
    block_size: int,
    absmax_scale: Tensor | None = None,
    absmax_mean: Tensor | None = None,
    scale_block: int = 0,
) -> PackedNf4:
    """`codes [N, K]` uint8 below 16, `table [16]` fp32, the rest as in `PackedNf4`. Raises `ValueError`."""
    num_features, width = codes.shape
    require(
        fits(width, block_size),
        f"blocks of {block_size} in rows of {width} columns; a power of two from {SMALLEST_BLOCK} up divides them",
    )
    require_vector("table", table, 16)
    require(table.dtype == torch.float32, f"table is {table.dtype}, must be float32")
    _check_scales(absmax, absmax_scale, absmax_mean, num_features * (width // block_size), scale_block)
    require_device(codes, absmax, table, absmax_scale, absmax_mean)
    tables = (table, table.to(torch.float16), table.to(torch.bfloat16))
    return PackedNf4(
        pack_words(codes), absmax, absmax_scale, absmax_mean, tables, width, block_size, scale_block
    )  # fmt: skip


def _check_scales(
    absmax: Tensor, absmax_scale: Tensor | None, absmax_mean: Tensor | None, blocks: int, scale_block: int
) -> None:
    if not scale_block:
        require(absmax.dtype == torch.float32, f"absmax is {absmax.dtype}, must be float32")
        require_vector("absmax", absmax, blocks)
        return
    padded = -(-blocks // scale_block) * scale_block
    require(absmax.dtype == torch.int8, f"absmax is {absmax.dtype}, must be int8 with scales of its own")
    require_vector("absmax", absmax, padded)
    require(absmax_scale is not None and absmax_mean is not None, "scale_block needs absmax_scale and absmax_mean")
    assert absmax_scale is not None
    assert absmax_mean is not None
    for name, tensor in (("absmax_scale", absmax_scale), ("absmax_mean", absmax_mean)):
        require(tensor.dtype == torch.float32, f"{name} is {tensor.dtype}, must be float32")
    require_vector("absmax_scale", absmax_scale, padded // scale_block)
    require_shape("absmax_mean", absmax_mean, ())
