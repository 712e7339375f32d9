"""One pass over tiles of keys and values of 4 or 2 bits whose scales and zero points belong to groups.

A word of 32 bits holds `32 / BITS` neighbouring dimensions of one token and head, the first in its lowest bits.
Numbers half as many dimensions apart lie 16 bits apart: masked together they are two fp16 numbers at once. So a
row is taken apart into `16 / BITS` parts, part i being the dimensions i, i + parts, i + 2 parts ... Queries are split
the same way and scores are the sum over parts; values are multiplied with their columns in the order of their pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.attention_quantized import halves, side_by_side
from infermix_kernels.attention_tile import visible_keys

#: pair - 1024, times the scales, plus the zero points, of two fp16 numbers; a factor has its scale in the lower half.
_FMA = tl.constexpr("""{
    .reg .b32 bias, number, scale, zero;
    mov.b32 bias, 0x64006400;
    sub.f16x2 number, $1, bias;
    prmt.b32 scale, $2, $3, 0x5410;
    prmt.b32 zero, $2, $3, 0x7632;
    fma.rn.f16x2 $0, number, scale, zero;
}""")


@triton.jit
def pair_at(words, PART: tl.constexpr, BITS: tl.constexpr):
    """Numbers PART and PART + 16 / BITS of every word, as two fp16 numbers 1024 + n side by side in an int32."""
    MASK: tl.constexpr = 0x000F000F if BITS == 4 else 0x00030003
    return ((words >> (BITS * PART)) & MASK) | 0x64006400


@triton.jit
def scaled(pairs, low, high):
    """Pairs of fp16 numbers dequantized in assembly, because the compiler takes packed pairs apart."""
    return tl.inline_asm_elementwise(_FMA, "=r,r,r,r", [pairs, low, high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def both_of(pairs, low, high, COMPUTE: tl.constexpr):
    """The two numbers of every pair dequantized in fp32, which works anywhere, the interpreter included."""
    first, second = halves(pairs, 1024.0)
    low_scale, low_zero = halves(low, 0.0)
    high_scale, high_zero = halves(high, 0.0)
    first = first.to(tl.float32) * low_scale.to(tl.float32) + low_zero.to(tl.float32)
    second = second.to(tl.float32) * high_scale.to(tl.float32) + high_zero.to(tl.float32)
    return first.to(COMPUTE), second.to(COMPUTE)


@triton.jit
def part_of(
    words,
    low,
    high,
    PART: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """`[ROWS, COLUMNS]`: one part of dequantized rows; `low`, `high`: factors of the two numbers of a pair."""
    pairs = pair_at(words, PART, BITS)
    if NATIVE:
        return side_by_side(scaled(pairs, low, high), ROWS, COLUMNS).to(COMPUTE)
    else:
        first, second = both_of(pairs, low, high, COMPUTE)
        return tl.reshape(tl.join(first, second), [ROWS, COLUMNS])


@triton.jit
def joined(parts, BITS: tl.constexpr):
    """Tensors of every part as one with two or three more dimensions, part i at index i of them."""
    if BITS == 4:
        return tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        return tl.join(even, odd)


@triton.jit
def rows_of_words(
    words,
    factors,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """`[ROWS, COLUMNS]` dequantized: word by word and part by part, the two numbers of a pair side by side.

    `in_order` puts the columns of a product with it in order, once for all tiles.
    """
    PARTS: tl.constexpr = 16 // BITS
    parts = ()
    for part in tl.static_range(PARTS):
        pairs = pair_at(words, part, BITS)
        if NATIVE:
            one = scaled(pairs, factors, factors)
        else:
            first, second = both_of(pairs, factors, factors, COMPUTE)
            one = tl.join(first, second)
        parts = parts + (one,)  # type: ignore[assignment]  # noqa: RUF005
    if NATIVE:
        pairs = tl.reshape(joined(parts, BITS), [ROWS, COLUMNS // 2])
        return side_by_side(pairs, ROWS, COLUMNS).to(COMPUTE)
    else:
        PAIRS: tl.constexpr = COLUMNS // 2 // PARTS
        first = ()
        second = ()
        for part in tl.static_range(PARTS):
            left, right = tl.split(parts[part])  # type: ignore[misc]
            first = first + (left,)  # type: ignore[assignment]  # noqa: RUF005
            second = second + (right,)  # type: ignore[assignment]  # noqa: RUF005
        low = tl.reshape(joined(first, BITS), [ROWS, PAIRS * PARTS])
        high = tl.reshape(joined(second, BITS), [ROWS, PAIRS * PARTS])
        return tl.reshape(tl.join(low, high), [ROWS, COLUMNS])


@triton.jit
def load_part(
    q,
    first_token,
    token,
    head,
    valid,
    largest,
    stride_qt,
    stride_qh,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    DK: tl.constexpr,
    PAD_K: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Dimensions PART, PART + PARTS, ... of queries, divided by the largest magnitude of their row."""
    dims = tl.arange(0, PAD_K // PARTS) * PARTS + PART
    rows = (first_token + token).to(tl.int64) * stride_qt + head * stride_qh
    part = tl.load(q + rows[:, None] + dims[None, :], mask=valid[:, None] & (dims[None, :] < DK), other=0.0)
    return (part.to(tl.float32) / largest[:, None]).to(COMPUTE)


@triton.jit
def load_words(pointers, columns, inside, WORDS: tl.constexpr, MASKED: tl.constexpr):
    """`[BLOCK_N, PAD]` words of which a token has WORDS; without MASKED, every token is there."""
    if MASKED:
        return tl.load(pointers, mask=(columns < WORDS)[None, :] & inside[:, None], other=0)
    elif columns.shape[0] != WORDS:
        return tl.load(pointers, mask=(columns < WORDS)[None, :], other=0)
    else:
        return tl.load(pointers)


@triton.jit
def attend_grouped(
    total,
    peak,
    queries,
    row_factor,
    q_pos,
    first_new,
    keys,
    values,
    key_factors,
    value_factors,
    table,
    kv_head,
    lo,
    hi,
    context,
    cap,
    window,
    HKV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """(Weighted values, sum of weights, largest score) of the tokens `lo ... hi`, all of them quantized.

    Weights are larger by a gain, so that small ones are normal numbers in fp16; the sums are not. Where BLOCK_N
    divides GROUP_SIZE, a tile is part of one group: its address is a scalar, and the factors of keys are those of one
    row.
    """
    PARTS: tl.constexpr = 16 // BITS
    NUMBERS: tl.constexpr = 32 // BITS
    IN_GROUP: tl.constexpr = GROUP_SIZE % BLOCK_N == 0
    GAIN: tl.constexpr = 8.0
    WORDS_K: tl.constexpr = DK // NUMBERS
    WORDS_V: tl.constexpr = DV // NUMBERS
    total = total * tl.math.exp2(GAIN)
    acc = tl.zeros([BLOCK_M, PAD_V], dtype=tl.float32)
    tokens = tl.arange(0, BLOCK_N)
    columns_k = tl.arange(0, PAD_K // NUMBERS)
    columns_v = tl.arange(0, PAD_V // NUMBERS)
    # One factor for all words of a group of channels, spread over them afterwards where that is a power of two.
    SPREAD: tl.constexpr = GROUP_SIZE // NUMBERS if GROUP_SIZE & (GROUP_SIZE - 1) == 0 else 1
    column_groups = tl.arange(0, PAD_V // NUMBERS // SPREAD) * SPREAD * NUMBERS // GROUP_SIZE
    if IN_GROUP:
        ids = tl.load(table + lo // BLOCK_SIZE, mask=lo < hi, other=0)
    else:
        ids = tl.load(table + (lo + tokens) // BLOCK_SIZE, mask=lo + tokens < hi, other=0)
    for tile in tl.range(0, tl.cdiv(hi - lo, BLOCK_N)):
        start = lo + tile * BLOCK_N
        position = start + tokens
        inside = position < hi
        if IN_GROUP:
            next_ids = tl.load(table + (start + BLOCK_N) // BLOCK_SIZE, mask=start + BLOCK_N < hi, other=0)
            group = ids.to(tl.int64) * (BLOCK_SIZE // GROUP_SIZE) + start % BLOCK_SIZE // GROUP_SIZE
            rows = (group * HKV + kv_head) * GROUP_SIZE + start % GROUP_SIZE
            factors_of_keys = (key_factors + (group * HKV + kv_head) * DK) + columns_k[None, :] * NUMBERS
            key_pointers = (keys + rows * WORDS_K) + (tokens[:, None] * WORDS_K + columns_k[None, :])
            value_pointers = (values + rows * WORDS_V) + (tokens[:, None] * WORDS_V + columns_v[None, :])
            factors_of_values = (value_factors + rows * (DV // GROUP_SIZE)) + (
                tokens[:, None] * (DV // GROUP_SIZE) + column_groups[None, :]
            )
        else:
            next_ids = tl.load(table + (position + BLOCK_N) // BLOCK_SIZE, mask=position + BLOCK_N < hi, other=0)
            group = ids.to(tl.int64) * (BLOCK_SIZE // GROUP_SIZE) + position % BLOCK_SIZE // GROUP_SIZE
            rows = (group * HKV + kv_head) * GROUP_SIZE + position % GROUP_SIZE
            factors_of_keys = key_factors + (((group * HKV + kv_head) * DK)[:, None] + columns_k[None, :] * NUMBERS)
            key_pointers = keys + ((rows * WORDS_K)[:, None] + columns_k[None, :])
            value_pointers = values + ((rows * WORDS_V)[:, None] + columns_v[None, :])
            factors_of_values = value_factors + ((rows * (DV // GROUP_SIZE))[:, None] + column_groups[None, :])

        words = load_words(key_pointers, columns_k, inside, WORDS_K, not IN_GROUP)
        scores = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for part in tl.static_range(PARTS):
            low = load_words(factors_of_keys + part, columns_k, inside, WORDS_K, not IN_GROUP)
            high = load_words(factors_of_keys + (part + PARTS), columns_k, inside, WORDS_K, not IN_GROUP)
            k = part_of(words, low, high, part, BITS, BLOCK_N, PAD_K // PARTS, COMPUTE, NATIVE)
            scores = tl.dot(queries[part], tl.trans(k), scores, input_precision=PRECISION)
        scores = scores * row_factor[:, None]
        if SOFTCAP:
            scores = cap * (1.0 - 2.0 / (tl.math.exp2(scores * (2.8853900817779268 / cap)) + 1.0))
        visible = visible_keys(position, q_pos, q_pos, first_new, context, window, WINDOW, False)
        if not IN_GROUP:
            visible = visible & inside[None, :]
        scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.math.exp2(scores - (anchor - GAIN)[:, None])
        decay = tl.math.exp2(peak - anchor)
        total = total * decay + tl.sum(weights, 1)
        small = weights.to(COMPUTE)
        words = load_words(value_pointers, columns_v, inside, WORDS_V, not IN_GROUP)
        factors = load_words(factors_of_values, column_groups, inside, DV // GROUP_SIZE, not IN_GROUP)
        if SPREAD > 1:
            spread = tl.broadcast_to(factors[:, :, None], [BLOCK_N, PAD_V // NUMBERS // SPREAD, SPREAD])
            factors = tl.reshape(spread, [BLOCK_N, PAD_V // NUMBERS])
        v = rows_of_words(words, factors, BITS, BLOCK_N, PAD_V, COMPUTE, NATIVE)
        acc = tl.dot(small, v, acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
        ids = next_ids
    return in_order(acc, BLOCK_M, PAD_V, BITS) * tl.math.exp2(-GAIN), total * tl.math.exp2(-GAIN), peak


@triton.jit
def in_order(acc, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Columns in the order of `rows_of_words` as those of the values."""
    PARTS: tl.constexpr = 16 // BITS
    apart = tl.reshape(acc, [ROWS, COLUMNS // PARTS // 2, PARTS, 2])
    return tl.reshape(tl.permute(apart, (0, 1, 3, 2)), [ROWS, COLUMNS])
