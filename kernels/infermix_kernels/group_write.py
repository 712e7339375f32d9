"""Quantizes groups of tokens that have become old: one program per group and head, idle where one has not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.attention_call import Prepared
from infermix_kernels.checks import require, require_device, require_shape
from infermix_kernels.launch import Launch
from infermix_kernels.reference.grouped import GroupedPools


@triton.jit
def quantized(x, there, AXIS: tl.constexpr, MOST: tl.constexpr):
    """(Numbers 0 ... MOST, factors) of a tile along an axis: the least number is the zero point, in fp16 like scales.

    A factor is a word with the scale in its lower half and the zero point above it.
    """
    low = tl.min(tl.where(there, x, float("inf")), AXIS, keep_dims=True)
    high = tl.max(tl.where(there, x, float("-inf")), AXIS, keep_dims=True)
    zero = tl.minimum(tl.maximum(low, -65504.0), 65504.0).to(tl.float16)
    scale = tl.math.div_rn(high - zero.to(tl.float32), MOST + 0.0 * high)
    scale = tl.minimum(tl.maximum(scale, 0.0), 65504.0).to(tl.float16)
    steps = scale.to(tl.float32)
    inverse = tl.where(steps > 0.0, tl.math.div_rn(1.0 + 0.0 * steps, tl.where(steps > 0.0, steps, 1.0)), 0.0)
    numbers = tl.minimum(tl.maximum((x - zero.to(tl.float32)) * inverse, 0.0), MOST * 1.0)
    # Adding 1.5 * 2^23 rounds to whole numbers, halves to even ones.
    numbers = ((numbers + 12582912.0) - 12582912.0).to(tl.int32)
    low_half = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return numbers, low_half | (zero.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def words_of(numbers, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """`[ROWS, COLUMNS]` numbers as `[ROWS, COLUMNS * BITS / 32]` words, the first number in the lowest bits."""
    NUMBERS: tl.constexpr = 32 // BITS
    shifts = tl.arange(0, NUMBERS) * BITS
    apart = tl.reshape(numbers, [ROWS, COLUMNS // NUMBERS, NUMBERS]) << shifts[None, None, :]
    return tl.sum(apart, 2)


@triton.jit
def load_group(
    tail, new, slots, fresh, there, head, columns, inside, stride_t, stride_h, WIDTH: tl.constexpr,
    HKV: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Tokens of a group, from the tail or, where `fresh` is not negative, from the new tokens; fp32."""
    mask = there[:, None] & inside[None, :]
    x = tl.load(tail + ((slots * HKV + head) * WIDTH)[:, None] + columns[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    if FRESH:
        arrived = fresh >= 0
        rows = (fresh * stride_t + head * stride_h)[:, None] + columns[None, :]
        added = tl.load(new + rows, mask=mask & arrived[:, None], other=0.0)
        x = tl.where(arrived[:, None], added.to(tl.float32), x)
    return x


@triton.jit
def write_groups_kernel(
    k,
    v,
    tail_keys,
    tail_values,
    old,
    fresh,
    target,
    keys,
    values,
    key_factors,
    value_factors,
    num_groups,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    HKV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FRESH: tl.constexpr,
):
    """Grid: groups, heads. Targets from `num_groups` on are the sink: nobody reads them, nothing is done."""
    MOST: tl.constexpr = 2**BITS - 1
    NUMBERS: tl.constexpr = 32 // BITS
    number = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group = tl.load(target + number)
    if group >= num_groups:
        return
    tokens = tl.arange(0, PAD_GROUP)
    there = tokens < GROUP_SIZE
    slots = tl.load(old + number * GROUP_SIZE + tokens, mask=there, other=0)
    sources = slots
    if FRESH:
        sources = tl.load(fresh + number * GROUP_SIZE + tokens, mask=there, other=-1)
    place = group * HKV + head

    columns = tl.arange(0, PAD_K)
    inside = columns < DK
    x = load_group(tail_keys, k, slots, sources, there, head, columns, inside, stride_kt, stride_kh, DK, HKV, FRESH)
    numbers, factors = quantized(x, there[:, None], 0, MOST)
    tl.store(key_factors + place * DK + columns[None, :], factors, mask=inside[None, :])
    words = words_of(tl.where(inside[None, :], numbers, 0), PAD_GROUP, PAD_K, BITS)
    at = tl.arange(0, PAD_K // NUMBERS)
    rows = (place * GROUP_SIZE + tokens)[:, None]
    mask = there[:, None] & (at < DK // NUMBERS)[None, :]
    tl.store(keys + rows * (DK // NUMBERS) + at[None, :], words, mask=mask)

    column = tl.arange(0, PAD_GROUP // NUMBERS)
    held = there[:, None] & (column < GROUP_SIZE // NUMBERS)[None, :]
    for part in range(DV // GROUP_SIZE):
        channels = part * GROUP_SIZE + tokens
        y = load_group(
            tail_values, v, slots, sources, there, head, channels, there, stride_vt, stride_vh, DV, HKV, FRESH
        )
        small, scales = quantized(y, there[None, :], 1, MOST)
        tl.store(value_factors + rows * (DV // GROUP_SIZE) + part, scales, mask=there[:, None])
        packed = words_of(tl.where(there[None, :], small, 0), PAD_GROUP, PAD_GROUP, BITS)
        first = part * (GROUP_SIZE // NUMBERS)
        tl.store(values + rows * (DV // NUMBERS) + first + column[None, :], packed, mask=held)


def write_groups(
    k: Tensor, v: Tensor, pools: GroupedPools, target: Tensor, old: Tensor, fresh: Tensor | None, num_groups: int
) -> None:
    """Quantize n groups of G tokens into the groups `target [n]` of the pools, except those from `num_groups` on.

    Token t of group i is row `fresh[i, t]` of the new tokens `k [T, Hkv, Dk]`, `v [T, Hkv, Dv]` where that is not
    negative, else what slot `old[i, t]` of the tail holds (slot s of row r is `r * capacity + s`); `fresh` is `None`
    where no token is new. Indices are int64. Capturable. Raises `ValueError` when shapes or dtypes do not fit.
    """
    heads, size, key_dim = pools.keys.shape[1], pools.group_size, pools.tail_keys.shape[3]
    value_dim, words = pools.tail_values.shape[3], 32 // pools.bits
    fitting = all(width % words == 0 for width in (size, key_dim, value_dim))
    require(fitting, f"groups of {size} in heads of {key_dim} and {value_dim}: multiples of {words} are needed")
    require_shape("k", k, (k.shape[0], heads, key_dim))
    require_shape("v", v, (k.shape[0], heads, value_dim))
    require(k.stride(2) == 1 and v.stride(2) == 1, "k and v must be contiguous in their last dimension")
    count = target.shape[0]
    _check_index("target", target, (count,))
    _check_index("old", old, (count, size))
    if fresh is not None:
        _check_index("fresh", fresh, (count, size))
    require_device(k, v, pools.keys, pools.tail_keys, target, old, fresh)
    if count:
        prepare(k, v, pools, (target, old, fresh), num_groups).run()


def _check_index(name: str, index: Tensor, shape: tuple[int, ...]) -> None:
    require_shape(name, index, shape)
    require(index.dtype == torch.int64 and index.is_contiguous(), f"{name} must be contiguous int64")


def prepare(
    k: Tensor, v: Tensor, pools: GroupedPools, indices: tuple[Tensor, Tensor, Tensor | None], num_groups: int
) -> Prepared:
    """The launch of `write_groups` with (target, old, fresh)."""
    target, old, fresh = indices
    heads, size = pools.keys.shape[1:3]
    key_dim, value_dim = pools.tail_keys.shape[3], pools.tail_values.shape[3]
    stored = (pools.keys, pools.values, pools.key_factors, pools.value_factors)
    arguments = (
        *(k, v, pools.tail_keys, pools.tail_values, old, fresh, target),
        *(part.view(torch.int32) for part in stored),
        num_groups,
        *k.stride()[:2],
        *v.stride()[:2],
    )
    constants = {
        "HKV": heads,
        "DK": key_dim,
        "DV": value_dim,
        "GROUP_SIZE": size,
        "PAD_K": triton.next_power_of_2(key_dim),
        "PAD_GROUP": triton.next_power_of_2(size),
        "BITS": pools.bits,
        "FRESH": fresh is not None,
        "num_warps": 4,
    }
    launch = Launch(size, size, 4, 1)
    return Prepared(write_groups_kernel, (target.shape[0], heads), arguments, constants, launch)
