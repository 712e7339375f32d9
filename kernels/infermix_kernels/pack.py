"""4-bit weights in the layout that the W4A16 kernels read, and the way there from GPTQ and AWQ checkpoints.

A word (int32) holds eight weights of one output feature that lie 32 columns apart: within each run of 256 columns,
bits 4 p ... 4 p + 3 of word j are column 32 p + j. So the eight nibbles of a tile of words are eight tiles of 32
consecutive columns each, which meet 32 consecutive columns of x without any shuffling, and all weights of a nibble
plane share their group when a group has a multiple of 32 columns. Rows are padded to a multiple of 256 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from infermix_kernels.checks import require, require_shape

#: Columns of a plane and of a run of words.
PLANE = 32
RUN = 8 * PLANE
#: Output feature c of a word of an AWQ checkpoint is its nibble number _AWQ_NIBBLES[c].
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class PackedW4:
    """`weight = (q - zero) * scale`, q in 0 ... 15.

    `words [N, runs * 32]` int32; `scales [groups, N]` in a floating dtype; `zeros [groups, N]` uint8, a floating
    dtype where they lie between integers (as `hqq` has them), or `None` for 8 everywhere. With act-order,
    `order [K]` int32 says which column of x meets column k.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    in_features: int
    group_size: int
    order: Tensor | None = None

    @property
    def out_features(self) -> int:
        return int(self.words.shape[0])

    @property
    def fractional(self) -> bool:
        """Whether zero points may lie between integers."""
        return self.zeros is not None and self.zeros.is_floating_point()

    @property
    def num_bytes(self) -> int:
        parts = (self.words, self.scales, self.zeros, self.order)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[N, K]`, columns in the order of x."""
        q = unpack_words(self.words, self.in_features).float()
        group = torch.arange(self.in_features, device=q.device) // self.group_size
        zeros = 8.0 if self.zeros is None else self.zeros.float().t()[:, group]
        weight = ((q - zeros) * self.scales.float().t()[:, group]).to(dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order.long(), weight)


def pack_w4(q: Tensor, scales: Tensor, zeros: Tensor | None = None, *, group_index: Tensor | None = None) -> PackedW4:
    """`q [N, K]` uint8 below 16, `scales [N, groups]`, `zeros [N, groups]` uint8 (at most 16) or floating -> packed.

    Groups are equal runs of columns, of a multiple of 32, unless `group_index [K]` says which group each column
    belongs to (act-order): then columns are sorted by group, which must all be equally large. Raises `ValueError`.
    """
    num_features, width = q.shape
    groups = scales.shape[1]
    require_shape("scales", scales, (num_features, groups))
    require(groups > 0 and width % groups == 0, f"{groups} groups do not divide {width} columns")
    group_size = width // groups
    require(group_size % PLANE == 0, f"groups have {group_size} columns, must have a multiple of {PLANE}")
    fits = RUN % group_size == 0 or group_size % RUN == 0 or groups == 1
    require(fits, f"groups of {group_size} columns; supported: 32, 64, 128, 256 k, all columns")
    if zeros is not None:
        require_shape("zeros", zeros, (num_features, groups))
        require(
            zeros.is_floating_point() or int(zeros.max()) <= 16,
            f"a zero point is {int(zeros.max())}, at most 16 is supported",
        )
    order = None if group_index is None else _order_by_group(group_index, groups, group_size)
    if order is not None:
        q = q[:, order.long()]
    return PackedW4(
        words=pack_words(q),
        scales=scales.t().contiguous(),
        zeros=None if zeros is None else (zeros if zeros.is_floating_point() else zeros.byte()).t().contiguous(),
        in_features=width,
        group_size=group_size,
        order=order,
    )


def pack_words(q: Tensor) -> Tensor:
    """`[N, K]` below 16 -> int32 `[N, ceil(K / 256) * 32]`."""
    runs = -(-q.shape[1] // RUN)
    planes = F.pad(q.to(torch.uint8), (0, runs * RUN - q.shape[1])).view(q.shape[0], runs, 8, PLANE)
    words = torch.zeros(q.shape[0], runs, PLANE, dtype=torch.int32, device=q.device)
    for plane in range(8):
        words |= planes[:, :, plane].to(torch.int32) << (4 * plane)
    return words.view(q.shape[0], runs * PLANE)


def unpack_words(words: Tensor, num_columns: int) -> Tensor:
    """The inverse of `pack_words`, uint8."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)[:, None]
    planes = (words.view(words.shape[0], -1, 1, PLANE) >> shifts) & 15
    return planes.reshape(words.shape[0], -1)[:, :num_columns].to(torch.uint8)


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, zeros_minus_one: bool
) -> PackedW4:
    """A GPTQ linear: `qweight [K / 8, N]`, `qzeros [groups, N / 8]` int32, `scales [groups, N]`, `g_idx [K]`.

    Nibble i of a word is row (column) 8 r + i, low bits first. `zeros_minus_one`: the checkpoint stores zero points
    minus one (format `gptq`, v1) rather than as they are (`gptq_v2`); a wrong choice ruins the model silently.
    """
    q = _nibbles(qweight.t()).to(torch.uint8)
    zeros = (_nibbles(qzeros) + int(zeros_minus_one)).to(torch.uint8)
    return pack_w4(q, scales.t(), zeros.t() if _has_zeros(zeros) else None, group_index=_act_order(g_idx, scales))


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> PackedW4:
    """An AWQ (GEMM) linear: `qweight [K, N / 8]`, `qzeros [groups, N / 8]` int32, `scales [groups, N]`."""
    order = torch.tensor(_AWQ_NIBBLES, device=qweight.device)
    q = _nibbles(qweight, order).to(torch.uint8)
    zeros = _nibbles(qzeros, order).to(torch.uint8)
    return pack_w4(q.t(), scales.t(), zeros.t() if _has_zeros(zeros) else None)


def _nibbles(words: Tensor, order: Tensor | None = None) -> Tensor:
    """int32 `[R, C]` -> `[R, 8 C]`, low bits first, or item i of each word being its nibble `order[i]`."""
    places = torch.arange(8, device=words.device) if order is None else order
    shifts = (4 * places).to(torch.int32)
    return ((words[:, :, None] >> shifts) & 15).reshape(words.shape[0], -1)


def _has_zeros(zeros: Tensor) -> bool:
    """Whether zero points say more than that the middle of the range is zero."""
    return not bool((zeros == 8).all())


def _act_order(g_idx: Tensor | None, scales: Tensor) -> Tensor | None:
    """`g_idx`, unless it only counts equal runs of columns."""
    if g_idx is None:
        return None
    size = g_idx.numel() // scales.shape[0]
    plain = torch.arange(g_idx.numel(), device=g_idx.device) // size
    return None if torch.equal(plain, g_idx.to(plain.dtype)) else g_idx


def _order_by_group(group_index: Tensor, groups: int, group_size: int) -> Tensor:
    require_shape("group_index", group_index, (groups * group_size,))
    counts = torch.bincount(group_index.long(), minlength=groups)
    equal = counts.numel() == groups and bool((counts == group_size).all())
    require(equal, f"groups have {counts.tolist()} columns, must have {group_size} each")
    return torch.argsort(group_index.long(), stable=True).to(torch.int32)
