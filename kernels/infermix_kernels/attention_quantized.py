"""One pass over tiles of int8 or fp8 keys and values, unpacked four to a word inside the kernel.

A word holds dimensions 4w ... 4w + 3 of one token and head. Two of its bytes at a time become fp16 in a few integer
operations. Scores are the product over even dimensions plus that over odd ones; output is four accumulators, one for
each byte of a word. Scales are applied to scores and weights, never to the data.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.attention_tile import DENSE, block_ids, load_scales, load_tile, tile_pointers, visible_keys

#: Formats of a pool.
PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)

_EVEN_INT8 = tl.constexpr("""{
    .reg .b32 bias, pair;
    mov.b32 bias, 0x64806480;
    lop3.b32 pair, $1, 0x00ff00ff, 0x64806480, 0x6a;
    sub.f16x2 $0, pair, bias;
}""")
_ODD_INT8 = tl.constexpr("""{
    .reg .b32 bias, pair;
    mov.b32 bias, 0x64806480;
    shr.u32 pair, $1, 8;
    lop3.b32 pair, pair, 0x00ff00ff, 0x64806480, 0x6a;
    sub.f16x2 $0, pair, bias;
}""")
_EVEN_FP8 = tl.constexpr("""{
    .reg .b32 sign, rest;
    shl.b32 sign, $1, 8;
    shl.b32 rest, $1, 7;
    and.b32 rest, rest, 0x3f803f80;
    lop3.b32 $0, sign, 0x80008000, rest, 0xea;
}""")
_ODD_FP8 = tl.constexpr("""{
    .reg .b32 rest;
    shr.u32 rest, $1, 1;
    and.b32 rest, rest, 0x3f803f80;
    lop3.b32 $0, $1, 0x80008000, rest, 0xea;
}""")


@triton.jit
def lanes_of(words, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes 0 and 2, and bytes 1 and 3, of every word as two fp16 numbers in an int32; fp8 as 1/256 of its value.

    int8: the byte with its sign bit flipped is the low mantissa of 1024, that is 1024 + 128 + value. fp8 e4m3: its
    exponent and mantissa are the upper bits of fp16's, whose bias is larger by 8; subnormal values fit too. NATIVE
    says the same in assembly, because the compiler takes packed pairs apart; the interpreter does not know it.
    """
    if NATIVE:
        even = tl.inline_asm_elementwise(
            _EVEN_INT8 if FORMAT == INT8 else _EVEN_FP8, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
        odd = tl.inline_asm_elementwise(
            _ODD_INT8 if FORMAT == INT8 else _ODD_FP8, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
        return even, odd
    else:
        if FORMAT == INT8:
            return minus_bias(words & 0x00FF00FF), minus_bias((words >> 8) & 0x00FF00FF)
        else:
            even = ((words << 8) & -2147450880) | ((words << 7) & 0x3F803F80)
            return even, (words & -2147450880) | ((words >> 1) & 0x3F803F80)


@triton.jit
def halves(lanes):
    """The two fp16 values of each int32."""
    low = lanes.to(tl.int16).to(tl.float16, bitcast=True)
    high = (lanes >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def minus_bias(lanes):
    """Two bytes in an int32 as two fp16 numbers, without assembly."""
    low, high = halves(lanes ^ 0x64806480)
    low = (low - 1152.0).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = (high - 1152.0).to(tl.int16, bitcast=True).to(tl.int32)
    return low | (high << 16)


@triton.jit
def side_by_side(lanes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`[ROWS, COLUMNS / 2]` pairs as a matrix of fp16 whose columns 2w and 2w + 1 are those of pair w."""
    low, high = halves(lanes)
    return tl.reshape(tl.join(low, high), [ROWS, COLUMNS])


@triton.jit
def interleave(part0, part1, part2, part3, BLOCK_M: tl.constexpr, PAD: tl.constexpr):
    """Column 4w + j of the result is column w of part j."""
    return tl.reshape(tl.join(tl.join(part0, part2), tl.join(part1, part3)), [BLOCK_M, PAD])


@triton.jit
def split_queries(query, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, PAD_K: tl.constexpr):
    """Even and odd columns of the queries, scaled into [-1, 1] a row, and the factor of each row."""
    wide = query.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    small = (wide / largest[:, None]).to(COMPUTE)
    even, odd = tl.split(tl.reshape(small, [BLOCK_M, PAD_K // 2, 2]))
    return even, odd, largest


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

    Accumulators hold sums of weights times scales times values / 64 (int8) or / 256 (fp8) times 64 or 256: weights
    are scaled up by the gain so that fp16 holds them, and the result is scaled back at the end.
    """
    GAIN: tl.constexpr = 64.0 if FORMAT == INT8 else 256.0
    UNIT: tl.constexpr = 1.0 if FORMAT == INT8 else 256.0
    q_even, q_odd, largest = split_queries(query, COMPUTE, BLOCK_M, PAD_K)
    row_factor = largest * (factor * UNIT)
    late = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
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
            tile_pointers(keys, ids, start, stride_kb, stride_kt, PAD_K // 4, BLOCK_N, BLOCK_SIZE, ADDRESSING, WIDE),
            inside,
            DK // 4,
            PAD_K // 4,
            ADDRESSING == DENSE,
        )
        even, odd = lanes_of(words, FORMAT, NATIVE)
        k_even = side_by_side(even, BLOCK_N, PAD_K // 2).to(COMPUTE)
        k_odd = side_by_side(odd, BLOCK_N, PAD_K // 2).to(COMPUTE)
        scores = tl.dot(q_even, tl.trans(k_even), input_precision=PRECISION)
        scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision=PRECISION)
        scores = scores * (row_factor[:, None] * scales[None, :])
        if SOFTCAP:
            scores = cap * (1.0 - 2.0 / (tl.math.exp2(scores * (2.8853900817779268 / cap)) + 1.0))
        visible = visible_keys(position, q_pos, tree_bits, first_new, context, window, WINDOW, TREE)
        scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.math.exp2(scores - anchor[:, None])
        decay = tl.math.exp2(peak - anchor)
        if LATE_SUMS:
            total = total * decay
            late = late * decay[:, None] + weights
        else:
            total = total * decay + tl.sum(weights, 1)
        scales = load_scales(value_scales, ids, start, inside, stride_sb, stride_st, BLOCK_N, BLOCK_SIZE, ADDRESSING)
        scaled = (weights * (scales * GAIN)[None, :]).to(COMPUTE)
        words = load_tile(
            tile_pointers(
                values, ids, start, stride_vb, stride_vt, PAD_V // 4, BLOCK_N, BLOCK_SIZE, ADDRESSING, WIDE
            ),
            inside,
            DV // 4,
            PAD_V // 4,
            True,
        )
        even, odd = lanes_of(words, FORMAT, NATIVE)
        v0, v2 = halves(even)
        v1, v3 = halves(odd)
        acc0 = tl.dot(scaled, v0.to(COMPUTE), acc0 * decay[:, None], input_precision=PRECISION)
        acc1 = tl.dot(scaled, v1.to(COMPUTE), acc1 * decay[:, None], input_precision=PRECISION)
        acc2 = tl.dot(scaled, v2.to(COMPUTE), acc2 * decay[:, None], input_precision=PRECISION)
        acc3 = tl.dot(scaled, v3.to(COMPUTE), acc3 * decay[:, None], input_precision=PRECISION)
        peak = new_peak
        ids = next_ids
    if LATE_SUMS:
        total += tl.sum(late, 1)
    acc = interleave(acc0, acc1, acc2, acc3, BLOCK_M, PAD_V) * (UNIT / GAIN)
    return acc, total, peak
