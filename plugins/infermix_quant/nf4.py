"""NF4: four bits at the quantiles of a normal distribution, a scale per block.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023): section 3 and appendix E.
"""

from __future__ import annotations

import torch
from infermix.errors import UserError
from infermix.toolkit.linears import FoundLinear
from infermix.toolkit.packed_columns import pack_columns, unpack_columns
from torch import Tensor
from torch.nn import functional as F

from infermix_quant.linear_grouped import QuantLinear

#: The sixteen values of appendix E.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_SCALE_LEVELS = 127


def nearest_codes(values: Tensor) -> Tensor:
    """Index of the nearest of `NF4_VALUES` to each value in -1 ... 1, uint8."""
    table = torch.tensor(NF4_VALUES, device=values.device)
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2).to(torch.uint8)


class Nf4Linear(QuantLinear):
    """Blocks of `block_size` weights, rows one after another, with the largest magnitude of each as its scale.

    Scales are fp32, or with `scale_block` themselves 8-bit integers: their mean is taken off, and `scale_block` of
    them share an fp32 scale.
    """

    kernel = "dequantize+matmul"
    block_size: int
    scale_block: int | None
    packed: Tensor
    absmax: Tensor
    absmax_scale: Tensor | None
    absmax_mean: Tensor | None
    table: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, *, block_size: int, scale_block: int | None) -> None:
        """`weight [out, in]`; its size is a multiple of `block_size`."""
        super().__init__(weight.shape[0], weight.shape[1], bias)
        self.block_size, self.scale_block = block_size, scale_block
        blocks = weight.detach().float().reshape(-1, block_size)
        absmax = blocks.abs().amax(dim=1)
        codes = nearest_codes(blocks / absmax.clamp_min(1e-30)[:, None])
        self.register_buffer("packed", pack_columns(codes.view(weight.shape), 4))
        integers, scale, mean = (absmax, None, None) if scale_block is None else _quantize_scales(absmax, scale_block)
        self.register_buffer("absmax", integers)
        self.register_buffer("absmax_scale", scale)
        self.register_buffer("absmax_mean", mean)
        self.register_buffer("table", torch.tensor(NF4_VALUES, device=weight.device), persistent=False)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes - self.table.numel() * self.table.element_size()

    def scales(self) -> Tensor:
        """fp32, one per block."""
        if self.scale_block is None:
            return self.absmax
        assert self.absmax_scale is not None
        assert self.absmax_mean is not None
        padded = self.absmax.float().view(-1, self.scale_block) * self.absmax_scale[:, None] + self.absmax_mean
        return padded.flatten()[: self.out_features * self.in_features // self.block_size]

    def codes(self) -> Tensor:
        """uint8 `[out, in]`, indices into `table`."""
        return unpack_columns(self.packed, 4, self.in_features)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """`[out, in]`."""
        values = self.table.index_select(0, self.codes().flatten().int()).view(-1, self.block_size)
        return (values * self.scales()[:, None]).to(dtype).view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype), self.bias)


def _quantize_scales(absmax: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """int8 `[ceil(n / block) * block]`, fp32 scale per block of them, their mean."""
    mean = absmax.mean()
    centred = F.pad(absmax - mean, (0, -absmax.numel() % block)).view(-1, block)
    scale = centred.abs().amax(dim=1).clamp_min(1e-30) / _SCALE_LEVELS
    return torch.round(centred / scale[:, None]).to(torch.int8).flatten(), scale, mean


def check_blocks(linear: FoundLinear, block_size: int) -> None:
    """Raises `UserError` naming a matrix that is not a whole number of blocks."""
    if linear.weight.numel() % block_size:
        raise UserError(
            f"blocks of {block_size} do not divide the {linear.weight.numel()} weights of {linear.name}",
            key="parts.quantizer.block_size",
            hint="a power of two that divides them",
        )
