"""The tensor-core kernel of 4-bit weights: weights become 16-bit numbers in registers, as the left operand."""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.dependent import wait_for_inputs
from infermix_kernels.matmul_tile import join_splits, store_product, tile_of
from infermix_kernels.w4a16_unpack import fractional_plane, offset_of, scaled_plane, split_zeros, unpack_plane


@triton.jit
def load_zeros(zeros, group, columns, N, num_groups, HAS_ZEROS: tl.constexpr):
    """Zero points of some output features in fp32; 8 when the weights have none."""
    if HAS_ZEROS:
        mask = (columns < N) & (group < num_groups)
        return tl.load(zeros + group * N + columns, mask=mask, other=0).to(tl.float32)
    else:
        return tl.full(columns.shape, 8.0, tl.float32)


@triton.jit
def one_plane(
    words, offset, rest, scale,
    PLANE: tl.constexpr, SCALED: tl.constexpr, FRACTIONAL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    if SCALED:
        return scaled_plane(words, offset, rest, scale, PLANE, FRACTIONAL, ASM)
    elif FRACTIONAL:
        return fractional_plane(words, offset, rest, PLANE, ASM)
    else:
        return unpack_plane(words, offset, offset, PLANE, False, ASM)


@triton.jit
def two_planes(
    words, offset, rest, scale,
    PLANE: tl.constexpr, SCALED: tl.constexpr, FRACTIONAL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    first = one_plane(words, offset, rest, scale, PLANE, SCALED, FRACTIONAL, ASM)
    return tl.join(first, one_plane(words, offset, rest, scale, PLANE + 1, SCALED, FRACTIONAL, ASM))


@triton.jit
def planes_of(
    words, offset, rest, scale,
    FIRST: tl.constexpr, COUNT: tl.constexpr, SCALED: tl.constexpr, FRACTIONAL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Planes FIRST ... FIRST + COUNT (1, 2 or 4) side by side: `[rows, 32 COUNT]`, a matter of naming registers."""
    ROWS: tl.constexpr = words.shape[0]
    if COUNT == 1:
        return one_plane(words, offset, rest, scale, FIRST, SCALED, FRACTIONAL, ASM)
    elif COUNT == 2:
        pair = two_planes(words, offset, rest, scale, FIRST, SCALED, FRACTIONAL, ASM)
        return tl.reshape(tl.permute(pair, (0, 2, 1)), [ROWS, 64])
    else:
        low = two_planes(words, offset, rest, scale, FIRST, SCALED, FRACTIONAL, ASM)
        high = two_planes(words, offset, rest, scale, FIRST + 2, SCALED, FRACTIONAL, ASM)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 3, 2, 1)), [ROWS, 128])


@triton.jit
def w4_tile_kernel(
    x,
    words,
    scales,
    zeros,
    out,
    bias,
    partial,
    counters,
    M,
    N,
    K,
    num_groups,
    stride_x,
    stride_w,
    stride_out,
    HAS_ZEROS: tl.constexpr,
    FRACTIONAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVICT: tl.constexpr,
    ASM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """`x [M, K] w^T`, 256 columns a step. Grid: tiles times SPLIT_K.

    SCALE_WEIGHTS rounds scaled weights to x's dtype before the product; otherwise the fp32 sum of each group is
    scaled, which is exact and costs time per group and element of the tile. TOGETHER planes are one operand of the
    tensor cores: a program waits for each product whose operand is made in registers, so few long ones cost less than
    many short ones. FRACTIONAL: zero points lie between integers.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    PER_STEP: tl.constexpr = 256 // GROUP_SIZE if GROUP_SIZE < 256 else 1
    PLANES: tl.constexpr = 8 // PER_STEP
    pid = tl.program_id(0)
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    tile, split = pid % num_tiles, pid // num_tiles
    tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, 32 * TOGETHER)
    steps = tl.cdiv(tl.cdiv(K, 256), SPLIT_K)
    first = split * steps
    x_at = x + rows.to(tl.int64)[:, None] * stride_x + ks[None, :]
    w_at = words + columns.to(tl.int64)[:, None] * stride_w + tl.arange(0, 32)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    last = tl.minimum(first + steps, tl.cdiv(K, 256))
    wait_for_inputs(PDL)
    for step in range(first, last):
        if EVEN_N:
            packed = tl.load(w_at + step * 32, eviction_policy=EVICT)
        else:
            packed = tl.load(w_at + step * 32, mask=(columns < N)[:, None], other=0, eviction_policy=EVICT)
        for part in tl.static_range(PER_STEP):
            group = (step * 256 + part * (256 // PER_STEP)) // GROUP_SIZE
            in_range = (columns < N) & (group < num_groups)
            scale = tl.load(scales + group * N + columns, mask=in_range, other=0.0)
            zero, rest = split_zeros(load_zeros(zeros, group, columns, N, num_groups, HAS_ZEROS), FRACTIONAL)
            offset = offset_of(zero, DTYPE, ASM)
            total = acc if SCALE_WEIGHTS else tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for chunk in tl.static_range(PLANES // TOGETHER):
                start = step * 256 + (part * PLANES + chunk * TOGETHER) * 32
                mask = (rows < M)[:, None]
                if not EVEN_K:
                    mask = mask & (start + ks < K)[None, :]
                xs = tl.load(x_at + start, mask=mask, other=0.0)
                weights = planes_of(
                    packed, offset[:, None], rest[:, None], scale[:, None], part * PLANES + chunk * TOGETHER,
                    TOGETHER, SCALE_WEIGHTS, FRACTIONAL, ASM,
                )  # fmt: skip
                total = tl.dot(weights, tl.trans(xs), total, input_precision=PRECISION)
            if SCALE_WEIGHTS:
                acc = total
            else:
                acc += total * scale.to(tl.float32)[:, None]
    acc = tl.trans(acc)
    if SPLIT_K == 1:
        store_product(acc, out, bias, bias, bias, rows, columns, M, N, stride_out, False, 0, HAS_BIAS)
    else:
        last, acc = join_splits(acc, partial, counters, tile, split, BLOCK_M, BLOCK_N, SPLIT_K)
        if last:
            store_product(acc, out, bias, bias, bias, rows, columns, M, N, stride_out, False, 0, HAS_BIAS)
