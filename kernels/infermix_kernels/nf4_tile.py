"""The tensor-core kernel of NF4 weights: values of x's dtype, looked up by their codes, as the left operand."""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.dependent import wait_for_inputs
from infermix_kernels.matmul_tile import join_splits, store_product, tile_of
from infermix_kernels.nf4_table import block_scales, look_up


@triton.jit
def look_up_two(words, table, PLANE: tl.constexpr, ASM: tl.constexpr):
    return tl.join(look_up(words, table, PLANE, ASM), look_up(words, table, PLANE + 1, ASM))


@triton.jit
def look_up_planes(words, table, FIRST: tl.constexpr, COUNT: tl.constexpr, ASM: tl.constexpr):
    """Planes FIRST ... FIRST + COUNT (1, 2 or 4) side by side: `[rows, 32 COUNT]`, a matter of naming registers."""
    ROWS: tl.constexpr = words.shape[0]
    if COUNT == 1:
        return look_up(words, table, FIRST, ASM)
    elif COUNT == 2:
        pair = look_up_two(words, table, FIRST, ASM)
        return tl.reshape(tl.permute(pair, (0, 2, 1)), [ROWS, 64])
    else:
        low = look_up_two(words, table, FIRST, ASM)
        high = look_up_two(words, table, FIRST + 2, ASM)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 3, 2, 1)), [ROWS, 128])


@triton.jit
def nf4_tile_kernel(
    x,
    words,
    absmax,
    absmax_scale,
    absmax_mean,
    table,
    out,
    bias,
    partial,
    counters,
    M,
    N,
    K,
    blocks,
    stride_x,
    stride_w,
    stride_out,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVICT: tl.constexpr,
    ASM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """`x [M, K] w^T`, 256 columns a step. Grid: tiles times SPLIT_K.

    The table is in x's dtype, and the fp32 sum of each block is scaled: as many roundings of a weight as rounding the
    scaled one has. TOGETHER planes of 32 columns are one operand of the tensor cores.
    """
    PARTS: tl.constexpr = 256 // BLOCK if BLOCK < 256 else 1
    PLANES: tl.constexpr = 8 // PARTS
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
        for part in tl.static_range(PARTS):
            group = (step * 256 + part * (256 // PARTS)) // BLOCK
            known = (columns < N) & (group < blocks)
            scale = block_scales(absmax, absmax_scale, absmax_mean, columns * blocks + group, known, SCALE_BLOCK, ASM)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for chunk in tl.static_range(PLANES // TOGETHER):
                start = step * 256 + (part * PLANES + chunk * TOGETHER) * 32
                mask = (rows < M)[:, None]
                if not EVEN_K:
                    mask = mask & (start + ks < K)[None, :]
                xs = tl.load(x_at + start, mask=mask, other=0.0)
                weights = look_up_planes(packed, table, part * PLANES + chunk * TOGETHER, TOGETHER, ASM)
                total = tl.dot(weights, tl.trans(xs), total, input_precision=PRECISION)
            acc += total * scale[:, None]
    acc = tl.trans(acc)
    if SPLIT_K == 1:
        store_product(acc, out, bias, bias, bias, rows, columns, M, N, stride_out, False, 0, HAS_BIAS)
    else:
        last, acc = join_splits(acc, partial, counters, tile, split, BLOCK_M, BLOCK_N, SPLIT_K)
        if last:
            store_product(acc, out, bias, bias, bias, rows, columns, M, N, stride_out, False, 0, HAS_BIAS)
