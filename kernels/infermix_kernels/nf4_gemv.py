"""NF4 products of one row, or a few one by one: multiply-adds in fp32, without the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.dependent import wait_for_inputs
from infermix_kernels.nf4_table import block_scales, look_up


@triton.jit
def nf4_gemv_kernel(
    x,
    words,
    absmax,
    absmax_scale,
    absmax_mean,
    table,
    bias,
    out,
    N,
    K,
    blocks,
    stride_x,
    stride_w,
    stride_out,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tiles of BLOCK_N output features, rows of x).

    A chunk is CHUNK words (32, or as many as a smaller block has columns): nibble p of its words are as many
    neighbouring columns, which share a scale. A step takes CHUNKS of them of each feature. The words of a step are
    asked for before those of the step before are multiplied, and the first ones before the kernel waits for x.
    """
    PARTS: tl.constexpr = 1 if BLOCK >= 256 else 256 // BLOCK if BLOCK >= 32 else 8
    PLANES: tl.constexpr = 8 // PARTS
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    within = tl.arange(0, CHUNK)
    num_words = tl.cdiv(K, 256) * 32
    offsets = chunks[:, None] * CHUNK + within[None, :]
    w_at = words + features.to(tl.int64)[:, None, None] * stride_w + offsets[None, :, :]
    valid = (features < N)[:, None, None]
    packed = tl.load(w_at, mask=valid & (offsets < num_words)[None, :, :], other=0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_N, CHUNKS, CHUNK], tl.float32)
    for start in range(0, num_words, CHUNKS * CHUNK):
        ahead = start + CHUNKS * CHUNK
        mask = valid & (ahead + offsets < num_words)[None, :, :]
        following = tl.load(w_at + ahead, mask=mask, other=0, eviction_policy="evict_first")
        first_word = start + chunks * CHUNK
        first_column = (first_word // 32) * 256 + first_word % 32
        for part in tl.static_range(PARTS):
            group = (first_column + part * (PLANES * 32)) // BLOCK
            index = features[:, None] * blocks + group[None, :]
            known = (features < N)[:, None] & (group < blocks)[None, :]
            scale = block_scales(absmax, absmax_scale, absmax_mean, index, known, SCALE_BLOCK, ASM)
            total = tl.zeros([BLOCK_N, CHUNKS, CHUNK], tl.float32)
            for plane in tl.static_range(part * PLANES, part * PLANES + PLANES):
                columns = first_column[:, None] + (plane * 32 + within)[None, :]
                xs = tl.load(x + row * stride_x + columns, mask=columns < K, other=0.0).to(tl.float32)
                total += look_up(packed, table, plane, ASM) * xs[None, :, :]
            acc += total * scale[:, :, None]
        packed = following
    result = tl.sum(tl.sum(acc, axis=2), axis=1)
    if HAS_BIAS:
        result += tl.load(bias + features, mask=features < N, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + features, result.to(out.dtype.element_ty), mask=features < N)
