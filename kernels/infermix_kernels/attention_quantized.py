"""One pass over tiles of int8 or fp8 keys and values, unpacked four to a word inside the kernel.

A word holds dimensions 4w ... 4w + 3 of one token and head; two of them at a time become fp16 in two or three
instructions. Scales are applied to scores and weights, never to the data. Narrow tiles of query rows (decode) take
operands from registers, where rearranging the data would cost more than the products: they add up scores over the
two kinds of pairs, and keep four accumulators, one for each byte of a word. Wide tiles pass their operands through
shared memory and put the dimensions in order there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.attention_tile import DENSE, block_ids, load_scales, load_tile, tile_pointers, visible_keys

#: Formats of a pool.
PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)
#: Rows from which on a tile is wide: there the tensor cores read their operands from shared memory.
WIDE_ROWS = tl.constexpr(64)

_FIRST_INT8 = tl.constexpr("lop3.b32 $0, $1, 0x00ff00ff, 0x64806480, 0x6a;")
_SECOND_INT8 = tl.constexpr("""{
    .reg .b32 pair;
    shr.u32 pair, $1, 8;
    lop3.b32 $0, pair, 0x00ff00ff, 0x64806480, 0x6a;
}""")
_FIRST_FP8 = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $1;
    cvt.rn.f16x2.e4m3x2 $0, low;
}""")
_SECOND_FP8 = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $1;
    cvt.rn.f16x2.e4m3x2 $0, high;
}""")


@triton.jit
def pairs_of(words, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """The four bytes of every word as two int32 of two fp16 numbers each.

    int8: bytes 0 and 2, and bytes 1 and 3, as 1152 + value: the byte with its sign bit flipped is the low mantissa of
    1024. fp8 e4m3: bytes 0 and 1, and bytes 2 and 3. NATIVE says it in assembly, because the compiler takes packed
    pairs apart; the other way works anywhere, the interpreter included.
    """
    if NATIVE:
        first = tl.inline_asm_elementwise(
            _FIRST_INT8 if FORMAT == INT8 else _FIRST_FP8, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
        second = tl.inline_asm_elementwise(
            _SECOND_INT8 if FORMAT == INT8 else _SECOND_FP8, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
        return first, second
    else:
        if FORMAT == INT8:
            return (words & 0x00FF00FF) ^ 0x64806480, ((words >> 8) & 0x00FF00FF) ^ 0x64806480
        else:
            return (
                fp8_bits(words) | (fp8_bits(words >> 8) << 16),
                fp8_bits(words >> 16) | (fp8_bits(words >> 24) << 16),
            )


@triton.jit
def fp8_bits(byte):
    """Bits of the fp16 number that the lowest byte is in e4m3: the same fields under a bias larger by 8."""
    small = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    number = small.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return number.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def halves(pairs, BIAS: tl.constexpr):
    """The two fp16 numbers of each int32, without their bias."""
    low = pairs.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    if BIAS != 0:
        return low - BIAS, high - BIAS
    else:
        return low, high


@triton.jit
def in_order(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """`[ROWS, COLUMNS / 4]` words as the matrix of their bytes."""
    first, second = pairs_of(words, FORMAT, NATIVE)
    if FORMAT == INT8:
        byte0, byte2 = halves(first, 1152.0)
        byte1, byte3 = halves(second, 1152.0)
    else:
        byte0, byte1 = halves(first, 0.0)
        byte2, byte3 = halves(second, 0.0)
    return tl.reshape(tl.join(tl.join(byte0, byte2), tl.join(byte1, byte3)), [ROWS, COLUMNS])


@triton.jit
def side_by_side(pairs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`[ROWS, COLUMNS / 2]` pairs as a matrix of fp16 whose columns 2w and 2w + 1 are those of pair w."""
    low, high = halves(pairs, 0.0)
    return tl.reshape(tl.join(low, high), [ROWS, COLUMNS])


@triton.jit
def split_columns(matrix, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    """Columns of a matrix in the order in which `side_by_side` has the first pairs, and the second pairs."""
    if FORMAT == INT8:
        first, second = tl.split(tl.reshape(matrix, [ROWS, COLUMNS // 2, 2]))
    else:
        by_pair = tl.permute(tl.reshape(matrix, [ROWS, COLUMNS // 4, 2, 2]), (0, 1, 3, 2))
        first, second = tl.split(by_pair)
        first = tl.reshape(first, [ROWS, COLUMNS // 2])
        second = tl.reshape(second, [ROWS, COLUMNS // 2])
    return first, second


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
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    LATE_SUMS: tl.constexpr,
):
    """As `attention_tile.attend`, masked, from an empty accumulator; pools are int32 words, their strides too.

    Queries are scaled into [-1, 1] a row, so that fp16 holds them, and scores scaled back. Weights are larger by a
    gain, so that fp16 holds them once they are multiplied by the scale of a value (its largest number over 127 or
    448); sums of weights are larger by the same. The bias of int8 keys is taken off the scores.
    """
    GAIN: tl.constexpr = 6.0 if FORMAT == INT8 else 8.0
    BIAS: tl.constexpr = 1152.0 if FORMAT == INT8 else 0.0
    NARROW: tl.constexpr = BLOCK_M < WIDE_ROWS
    wide = query.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    small = (wide / largest[:, None]).to(COMPUTE)
    row_factor = largest * factor
    row_bias = tl.sum(small.to(tl.float32), 1) * BIAS
    total = total * tl.math.exp2(GAIN)
    late = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if NARROW:
        q_first, q_second = split_columns(small, BLOCK_M, PAD_K, FORMAT)
        acc0 = tl.zeros([BLOCK_M, PAD_V // 4], dtype=tl.float32)
        acc1 = tl.zeros([BLOCK_M, PAD_V // 4], dtype=tl.float32)
        acc2 = tl.zeros([BLOCK_M, PAD_V // 4], dtype=tl.float32)
        acc3 = tl.zeros([BLOCK_M, PAD_V // 4], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, PAD_V], dtype=tl.float32)
    ids = block_ids(table, lo, context, BLOCK_N, BLOCK_SIZE, ADDRESSING)
    for tile in tl.range(0, tl.cdiv(hi - lo, BLOCK_N)):
        start = lo + tile * BLOCK_N
        next_ids = block_ids(table, start + BLOCK_N, context, BLOCK_N, BLOCK_SIZE, ADDRESSING)
        position = start + tl.arange(0, BLOCK_N)
        inside = position < context
        scales = load_scales(key_scales, ids, start, inside, stride_sb, stride_st, BLOCK_N, BLOCK_SIZE, ADDRESSING)
        pointers = tile_pointers(
            keys, ids, start, stride_kb, stride_kt, PAD_K // 4, BLOCK_N, BLOCK_SIZE, ADDRESSING, WIDE
        )
        words = load_tile(pointers, inside, DK // 4, PAD_K // 4, ADDRESSING == DENSE)
        if NARROW:
            first, second = pairs_of(words, FORMAT, NATIVE)
            k_first = side_by_side(first, BLOCK_N, PAD_K // 2).to(COMPUTE)
            k_second = side_by_side(second, BLOCK_N, PAD_K // 2).to(COMPUTE)
            scores = tl.dot(q_first, tl.trans(k_first), input_precision=PRECISION)
            scores = tl.dot(q_second, tl.trans(k_second), scores, input_precision=PRECISION)
            scores = (scores - row_bias[:, None]) * (row_factor[:, None] * scales[None, :])
        else:
            k = in_order(words, BLOCK_N, PAD_K, FORMAT, NATIVE).to(COMPUTE)
            scores = tl.dot(small, tl.trans(k), input_precision=PRECISION)
            scores = scores * (row_factor[:, None] * scales[None, :])
        if SOFTCAP:
            scores = cap * (1.0 - 2.0 / (tl.math.exp2(scores * (2.8853900817779268 / cap)) + 1.0))
        visible = visible_keys(position, q_pos, tree_bits, first_new, context, window, WINDOW, TREE)
        scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.math.exp2(scores - (anchor - GAIN)[:, None])
        decay = tl.math.exp2(peak - anchor)
        if LATE_SUMS:
            total = total * decay
            late = late * decay[:, None] + weights
        else:
            total = total * decay + tl.sum(weights, 1)
        scales = load_scales(value_scales, ids, start, inside, stride_sb, stride_st, BLOCK_N, BLOCK_SIZE, ADDRESSING)
        scaled = (weights * scales[None, :]).to(COMPUTE)
        pointers = tile_pointers(
            values, ids, start, stride_vb, stride_vt, PAD_V // 4, BLOCK_N, BLOCK_SIZE, ADDRESSING, WIDE
        )
        # Beyond the context weights are zeros, and every int8 is a finite number; an fp8 may be NaN.
        words = load_tile(pointers, inside, DV // 4, PAD_V // 4, FORMAT != INT8 or ADDRESSING == DENSE)
        if NARROW:
            first, second = pairs_of(words, FORMAT, NATIVE)
            v0, v1 = halves(first, BIAS)
            v2, v3 = halves(second, BIAS)
            acc0 = tl.dot(scaled, v0.to(COMPUTE), acc0 * decay[:, None], input_precision=PRECISION)
            acc1 = tl.dot(scaled, v1.to(COMPUTE), acc1 * decay[:, None], input_precision=PRECISION)
            acc2 = tl.dot(scaled, v2.to(COMPUTE), acc2 * decay[:, None], input_precision=PRECISION)
            acc3 = tl.dot(scaled, v3.to(COMPUTE), acc3 * decay[:, None], input_precision=PRECISION)
        else:
            v = in_order(words, BLOCK_N, PAD_V, FORMAT, NATIVE).to(COMPUTE)
            acc = tl.dot(scaled, v, acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
        ids = next_ids
    if LATE_SUMS:
        total += tl.sum(late, 1)
    if NARROW:
        if FORMAT == INT8:
            acc = tl.join(tl.join(acc0, acc1), tl.join(acc2, acc3))
        else:
            acc = tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3))
        acc = tl.reshape(acc, [BLOCK_M, PAD_V])
    return acc, total, peak
