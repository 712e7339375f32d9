"""What `infermix_kernels.attention_grouped` means, in plain PyTorch, and how its numbers lie in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infermix_kernels.reference.attention import attend, visible_keys

_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class GroupedPools:
    """Old tokens in groups of G, quantized; recent ones in rows of `capacity` that are written round and round.

    - `keys` `[groups, Hkv, G, Dk * bits / 8]`, `values` alike, uint8: `pack`ed
    - `key_factors` `[groups, Hkv, Dk, 2]`: scale and zero point of each channel of a group, fp16
    - `value_factors` `[groups, Hkv, G, Dv / G, 2]`: of each G channels of a token
    - `tail_keys` `[rows, capacity, Hkv, Dk]`, `tail_values` alike, as written: token p of a context is at
      p % capacity. Of a context, tokens in whole groups that are older than its last `num_recent` are read from
      their groups, the others here.

    A number times its scale plus its zero point is the value. Group i of block b is group
    `b * block_size / G + i` of the pools.
    """

    keys: Tensor
    values: Tensor
    key_factors: Tensor
    value_factors: Tensor
    tail_keys: Tensor
    tail_values: Tensor
    block_size: int
    num_recent: int

    @property
    def group_size(self) -> int:
        return self.keys.shape[2]

    @property
    def bits(self) -> int:
        return self.keys.shape[3] * 8 // self.tail_keys.shape[3]

    def num_flushed(self, context: int) -> int:
        """Tokens of a context that are read from their groups."""
        return max(context - self.num_recent, 0) // self.group_size * self.group_size

    def read(self, groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K `[n * G, Hkv, Dk]` and V alike of `groups [n]`, computed in fp32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        key_scale, key_zero = self.key_factors.index_select(0, groups).to(wide).unbind(-1)
        keys = unpack(self.keys.index_select(0, groups), self.bits).to(wide)
        keys = keys * key_scale[:, :, None] + key_zero[:, :, None]
        scale, zero = self.value_factors.index_select(0, groups).to(wide).unbind(-1)
        values = unpack(self.values.index_select(0, groups), self.bits).to(wide)
        values = values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None] + zero[..., None]
        both = keys, values.flatten(-2)
        k, v = (part.transpose(1, 2).flatten(0, 1).to(dtype) for part in both)
        return k, v


def quantize(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers uint8 below `2 ** bits`, scale and zero point fp16 with `dim` of size 1: `number * scale + zero = x`.

    Asymmetric: the least number of a group along `dim` is its zero point, the greatest the last step above it.
    """
    wide = x.float()
    low, high = wide.amin(dim, keepdim=True), wide.amax(dim, keepdim=True)
    zero = low.clamp(-_LARGEST, _LARGEST).half()
    scale = ((high - zero.float()) / (2**bits - 1)).clamp(0, _LARGEST).half()
    steps = scale.float()
    inverse = torch.where(steps > 0, 1 / steps, torch.zeros_like(steps))
    numbers = ((wide - zero.float()) * inverse).round().clamp(0, 2**bits - 1)
    return numbers.to(torch.uint8), scale, zero


def write_groups(k: Tensor, v: Tensor, pools: GroupedPools, target: Tensor) -> None:
    """Quantize whole groups `k [n, G, Hkv, Dk]`, `v [n, G, Hkv, Dv]` into the groups `target [n]`."""
    bits = pools.bits
    numbers, *factors = quantize(k.transpose(1, 2), bits, dim=2)
    pools.keys.index_copy_(0, target, pack(numbers, bits))
    pools.key_factors.index_copy_(0, target, torch.stack(factors, dim=-1).squeeze(2))
    grouped = v.transpose(1, 2).unflatten(-1, (pools.value_factors.shape[3], -1))
    numbers, *factors = quantize(grouped, bits, dim=-1)
    pools.values.index_copy_(0, target, pack(numbers.flatten(-2), bits))
    pools.value_factors.index_copy_(0, target, torch.cat(factors, dim=-1))


def pack(numbers: Tensor, bits: int) -> Tensor:
    """`[..., D]` uint8 below `2 ** bits` -> `[..., D * bits / 8]`: the first of a byte in its lowest bits."""
    shifts = torch.arange(0, 8, bits, device=numbers.device, dtype=torch.uint8)
    return (numbers.unflatten(-1, (-1, 8 // bits)) << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def grouped_attention(
    q: Tensor,
    pools: GroupedPools,
    *,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    tail_rows: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Same arguments and result as `infermix_kernels.attention_grouped.grouped_attention`, in the dtype of `q`."""
    out = q.new_zeros(q.shape[0], q.shape[1], pools.tail_values.shape[3])
    starts, contexts = cu_seqlens_q.tolist(), context_lens.tolist()
    for index, context in enumerate(contexts):
        rows = slice(starts[index], starts[index + 1])
        if context == 0 or rows.start == rows.stop:
            continue
        k, v = read_sequence(pools, block_tables[index], int(tail_rows[index]), context, q.dtype)
        visible = visible_keys(rows.stop - rows.start, context, window, None, q.device)
        out[rows] = attend(q[rows], k, v, visible, scale, softcap, sinks)
    return out


def read_sequence(
    pools: GroupedPools, blocks: Tensor, row: int, context: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K `[context, Hkv, Dk]` and V alike of the sequence with these blocks and this row of the tail."""
    flushed, per_block = pools.num_flushed(context), pools.block_size // pools.group_size
    number = torch.arange(flushed // pools.group_size, device=blocks.device)
    old = pools.read(blocks[number // per_block].long() * per_block + number % per_block, dtype)
    recent = torch.arange(flushed, context, device=blocks.device) % pools.tail_keys.shape[1]
    tails = (pools.tail_keys[row], pools.tail_values[row])
    k, v = (torch.cat((part, tail[recent].to(dtype))) for part, tail in zip(old, tails, strict=True))
    return k, v
