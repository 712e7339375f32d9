"""What the matrix products are made of: the order of tiles, the end of a split, the tile kernel of dense weights."""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.dependent import wait_for_inputs

#: How products are scaled: not, by one factor per output feature, or by one per group of input features.
UNSCALED = tl.constexpr(0)
PER_CHANNEL = tl.constexpr(1)
PER_GROUP = tl.constexpr(2)


@triton.jit
def tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Tiles in groups of GROUP_M rows of tiles, so that programs that run together share operands in the L2 cache."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    size = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    return group * GROUP_M + within % size, within // size


@triton.jit
def join_splits(
    acc, partial, counters, tile, split, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT_K: tl.constexpr
):  # fmt: skip
    """(whether this program is the last of its tile, the sum over all splits, in order, if it is)."""
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    slots = (partial + tile.to(tl.int64) * (SPLIT_K * ROWS * COLUMNS)).to(tl.pointer_type(acc.dtype))
    tl.store(slots + split * (ROWS * COLUMNS) + at, acc)
    tl.debug_barrier()
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1
    if last:
        tl.debug_barrier()
        acc = tl.load(slots + at, cache_modifier=".cg")
        for other in range(1, SPLIT_K):
            acc += tl.load(slots + other * (ROWS * COLUMNS) + at, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return last, acc


@triton.jit
def store_product(
    acc, out, x_scale, w_scale, bias, rows, columns, M, N, stride_out,
    HAS_X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`acc [BLOCK_M, BLOCK_N]`, scaled per row and per column, plus bias."""
    result = acc.to(tl.float32)
    if HAS_X_SCALE:
        result = result * tl.load(x_scale + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    if W_SCALE == PER_CHANNEL:
        result = result * tl.load(w_scale + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        result = result + tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def multiply(x, w, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """`acc += x w^T`, or its transpose.

    fp32 operands (PRECISION "ieee") meet on no tensor core: one multiply-add after the other rounds the sum, whose
    error grows with the square root of the number of columns (1.1e-6 of the result for 4,096). So the columns of a
    step are summed on their own, and the step is added: 2e-7. `max_num_imprecise_acc` means nothing for fp32; it
    keeps the compiler from turning the addition back into an accumulator of the product.
    """
    if PRECISION == "ieee":
        if SWAP:
            part = tl.dot(w, tl.trans(x), input_precision=PRECISION, max_num_imprecise_acc=1)
        else:
            part = tl.dot(x, tl.trans(w), input_precision=PRECISION, max_num_imprecise_acc=1)
        return acc + part
    elif SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision=PRECISION, out_dtype=acc.dtype)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def product_kernel(
    x,
    w,
    out,
    x_scale,
    w_scale,
    bias,
    partial,
    counters,
    M,
    N,
    K,
    stride_x,
    stride_w,
    stride_out,
    HAS_X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVICT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """`x [M, K] w [N, K]^T`. Grid: tiles times SPLIT_K. Weights of another dtype are converted to that of x.

    int8 operands are summed in int32, all others in fp32. Scales per group `[groups, N]` need a BLOCK_K that divides
    the group.
    """
    pid = tl.program_id(0)
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    tile, split = pid % num_tiles, pid // num_tiles
    tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first = split * steps
    x_at = x + rows.to(tl.int64)[:, None] * stride_x + ks[None, :]
    w_at = w + columns.to(tl.int64)[:, None] * stride_w + ks[None, :]
    integers: tl.constexpr = x.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if integers else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], SUM)
    last = tl.minimum(first + steps, tl.cdiv(K, BLOCK_K))
    wait_for_inputs(PDL)
    for step in range(first, last):
        start = step * BLOCK_K
        x_mask = (rows < M)[:, None]
        if not EVEN_K:
            x_mask = x_mask & (start + ks < K)[None, :]
        xs = tl.load(x_at + start, mask=x_mask, other=0.0)
        if EVEN_N and EVEN_K:
            ws = tl.load(w_at + start, eviction_policy=EVICT)
        else:
            w_mask = (columns < N)[:, None] & (start + ks < K)[None, :]
            ws = tl.load(w_at + start, mask=w_mask, other=0.0, eviction_policy=EVICT)
        if W_SCALE == PER_GROUP:
            scale = tl.load(w_scale + (start // GROUP_SIZE) * N + columns, mask=columns < N, other=0.0)
            part = multiply(xs, ws.to(xs.dtype), tl.zeros_like(acc), SWAP, PRECISION)
            if SWAP:
                acc += part * scale.to(tl.float32)[:, None]
            else:
                acc += part * scale.to(tl.float32)[None, :]
        else:
            acc = multiply(xs, ws.to(xs.dtype), acc, SWAP, PRECISION)
    if SWAP:
        acc = tl.trans(acc)
    if SPLIT_K == 1:
        store_product(
            acc, out, x_scale, w_scale, bias, rows, columns, M, N, stride_out, HAS_X_SCALE, W_SCALE, HAS_BIAS
        )
    else:
        last, acc = join_splits(acc, partial, counters, tile, split, BLOCK_M, BLOCK_N, SPLIT_K)
        if last:
            store_product(
                acc, out, x_scale, w_scale, bias, rows, columns, M, N, stride_out, HAS_X_SCALE, W_SCALE, HAS_BIAS
            )
