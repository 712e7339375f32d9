"""One pass over tiles of int8 or fp8 keys and values, unpacked four to a word inside the kernel.

A word holds dimensions 4w ... 4w + 3 of one token and head. Each of its bytes becomes fp16 in two or three integer
operations shared by two bytes, and the four bytes of all words make four matrices a quarter as wide: scores are the
sum of four products, output is four accumulators. Scales are applied to scores and weights, never to the data.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.attention_tile import block_ids, load_scales, load_tile, tile_pointers, visible_keys

#: Formats of a pool.
PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)


@triton.jit
def halves(lanes):
    """The two fp16 values of each int32."""
    low = lanes.to(tl.int16).to(tl.float16, bitcast=True)
    high = (lanes >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def unpack(words, FORMAT: tl.constexpr):
    """Bytes 0, 1, 2, 3 of every word as fp16, exactly; fp8 comes out as 1/256 of its value.

    int8: the byte with its sign bit flipped is the low mantissa of 1024, that is 1024 + 128 + value. fp8 e4m3: its
    exponent and mantissa are the upper bits of fp16's, whose bias is larger by 8; subnormal values fit too.
    """
    if FORMAT == INT8:
        even = (words & 0x00FF00FF) ^ 0x64806480
        odd = ((words >> 8) & 0x00FF00FF) ^ 0x64806480
        byte0, byte2 = halves(even)
        byte1, byte3 = halves(odd)
        return byte0 - 1152.0, byte1 - 1152.0, byte2 - 1152.0, byte3 - 1152.0
    else:
        even = ((words << 8) & -2147450880) | ((words << 7) & 0x3F803F80)
        odd = (words & -2147450880) | ((words >> 1) & 0x3F803F80)
        byte0, byte2 = halves(even)
        byte1, byte3 = halves(odd)
        return byte0, byte1, byte2, byte3


@triton.jit
def interleave(part0, part1, part2, part3, BLOCK_M: tl.constexpr, PAD: tl.constexpr):
    """Column 4w + j of the result is column w of part j."""
    return tl.reshape(tl.join(tl.join(part0, part2), tl.join(part1, part3)), [BLOCK_M, PAD])


@triton.jit
def split_queries(query, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, PAD_K: tl.constexpr):
    """Columns 4w + j of the queries for j = 0 ... 3, scaled into [-1, 1] a row, and the factor of each row."""
    wide = query.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    small = (wide / largest[:, None]).to(COMPUTE)
    first, second = tl.split(tl.reshape(small, [BLOCK_M, PAD_K // 4, 2, 2]))
    part0, part2 = tl.split(first)
    part1, part3 = tl.split(second)
    return part0, part1, part2, part3, largest


@triton.jit
def attend_quantized(
    total,
    peak,
    query,
    q_pos,
    tree_bits,
    first_new,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    lo,
    hi,
    context,
    factor,
    cap,
    window,
    stride_kb,
    stride_kt,
    stride_vb,
    stride_vt,
    stride_sb,
    stride_st,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ADDRESSING: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TREE: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `attention_tile.attend`, masked, from an empty accumulator; pools are int32 words, their strides too.

    Accumulators hold sums of weights times scales times values / 64 (int8) or / 256 (fp8) times 64 or 256: weights
    are scaled up by the gain so that fp16 holds them, and the result is scaled back at the end.
    """
    GAIN: tl.constexpr = 64.0 if FORMAT == INT8 else 256.0
    UNIT: tl.constexpr = 1.0 if FORMAT == INT8 else 256.0
    q0, q1, q2, q3, largest = split_queries(query, COMPUTE, BLOCK_M, PAD_K)
    row_factor = largest * (factor * UNIT)
    acc0 = tl.zeros([BLOCK_M, PAD_V // 4], dtype=tl.float32)
    acc1 = tl.zeros([BLOCK_M, PAD_V // 4], dtype=tl.float32)
    acc2 = tl.zeros([BLOCK_M, PAD_V // 4], dtype=tl.float32)
    acc3 = tl.zeros([BLOCK_M, PAD_V // 4], dtype=tl.float32)
    ids = block_ids(table, lo, context, BLOCK_N, BLOCK_SIZE, ADDRESSING)
    for tile in tl.range(0, tl.cdiv(hi - lo, BLOCK_N)):
        start = lo + tile * BLOCK_N
        next_ids = block_ids(table, start + BLOCK_N, context, BLOCK_N, BLOCK_SIZE, ADDRESSING)
        position = start + tl.arange(0, BLOCK_N)
        inside = position < context
        scales = load_scales(key_scales, ids, start, inside, stride_sb, stride_st, BLOCK_N, BLOCK_SIZE, ADDRESSING)
        words = load_tile(
            tile_pointers(keys, ids, start, stride_kb, stride_kt, PAD_K // 4, BLOCK_N, BLOCK_SIZE, ADDRESSING),
            inside,
            DK // 4,
            PAD_K // 4,
            True,
        )
        k0, k1, k2, k3 = unpack(words, FORMAT)
        scores = tl.dot(q0, tl.trans(k0.to(COMPUTE)), input_precision=PRECISION)
        scores = tl.dot(q1, tl.trans(k1.to(COMPUTE)), scores, input_precision=PRECISION)
        scores = tl.dot(q2, tl.trans(k2.to(COMPUTE)), scores, input_precision=PRECISION)
        scores = tl.dot(q3, tl.trans(k3.to(COMPUTE)), scores, input_precision=PRECISION)
        scores = scores * (row_factor[:, None] * scales[None, :])
        if SOFTCAP:
            scores = cap * (1.0 - 2.0 / (tl.math.exp2(scores * (2.8853900817779268 / cap)) + 1.0))
        visible = visible_keys(position, q_pos, tree_bits, first_new, context, window, WINDOW, TREE)
        scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.math.exp2(scores - anchor[:, None])
        decay = tl.math.exp2(peak - anchor)
        total = total * decay + tl.sum(weights, 1)
        scales = load_scales(value_scales, ids, start, inside, stride_sb, stride_st, BLOCK_N, BLOCK_SIZE, ADDRESSING)
        scaled = (weights * (scales * GAIN)[None, :]).to(COMPUTE)
        words = load_tile(
            tile_pointers(values, ids, start, stride_vb, stride_vt, PAD_V // 4, BLOCK_N, BLOCK_SIZE, ADDRESSING),
            inside,
            DV // 4,
            PAD_V // 4,
            True,
        )
        v0, v1, v2, v3 = unpack(words, FORMAT)
        acc0 = tl.dot(scaled, v0.to(COMPUTE), acc0 * decay[:, None], input_precision=PRECISION)
        acc1 = tl.dot(scaled, v1.to(COMPUTE), acc1 * decay[:, None], input_precision=PRECISION)
        acc2 = tl.dot(scaled, v2.to(COMPUTE), acc2 * decay[:, None], input_precision=PRECISION)
        acc3 = tl.dot(scaled, v3.to(COMPUTE), acc3 * decay[:, None], input_precision=PRECISION)
        peak = new_peak
        ids = next_ids
    acc = interleave(acc0, acc1, acc2, acc3, BLOCK_M, PAD_V) * (UNIT / GAIN)
    return acc, total, peak
