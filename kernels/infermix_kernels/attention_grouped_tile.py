"""One pass over tiles of keys and values of 4 or 2 bits whose scales and zero points belong to groups.

A word of 32 bits holds `32 / BITS` neighbouring dimensions of one token and head, the first in its lowest bits.
Numbers half as many dimensions apart lie 16 bits apart: masked together they are two fp16 numbers at once. So a
row is taken apart into `16 / BITS` parts, part i being the dimensions i, i + parts, i + 2 parts ...; queries are
split the same way, scores are the sum over parts, and every part has an accumulator of its own.
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
    """`[ROWS, COLUMNS]`: one part of dequantized rows; `low` and `high` are the factors of the two numbers of a pair.

    NATIVE says it in assembly on pairs of fp16, because the compiler takes packed pairs apart; the other way is exact
    and works anywhere, the interpreter included.
    """
    pairs = pair_at(words, PART, BITS)
    if NATIVE:
        pairs = tl.inline_asm_elementwise(_FMA, "=r,r,r,r", [pairs, low, high], dtype=tl.int32, is_pure=True, pack=1)
        return side_by_side(pairs, ROWS, COLUMNS).to(COMPUTE)
    else:
        first, second = halves(pairs, 1024.0)
        low_scale, low_zero = halves(low, 0.0)
        high_scale, high_zero = halves(high, 0.0)
        first = first.to(tl.float32) * low_scale.to(tl.float32) + low_zero.to(tl.float32)
        second = second.to(tl.float32) * high_scale.to(tl.float32) + high_zero.to(tl.float32)
        return tl.reshape(tl.join(first, second), [ROWS, COLUMNS]).to(COMPUTE)


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
    mask = (columns < WORDS)[None, :]
    if MASKED:
        mask = mask & inside[:, None]
    return tl.load(pointers, mask=mask, other=0)


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
    """(Accumulators of the parts of values, sum of weights, largest score) of the tokens `lo ... hi`, all quantized.

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
    accs = ()
    for _part in tl.static_range(PARTS):
        zeros = tl.zeros([BLOCK_M, PAD_V // PARTS], dtype=tl.float32)
        accs = accs + (zeros,)  # type: ignore[assignment]  # noqa: RUF005
    tokens = tl.arange(0, BLOCK_N)
    columns_k = tl.arange(0, PAD_K // NUMBERS)
    columns_v = tl.arange(0, PAD_V // NUMBERS)
    column_groups = tl.minimum(columns_v, WORDS_V - 1) * NUMBERS // GROUP_SIZE
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
        factors = load_words(factors_of_values, columns_v, inside, WORDS_V, not IN_GROUP)
        sums = ()
        for part in tl.static_range(PARTS):
            v = part_of(words, factors, factors, part, BITS, BLOCK_N, PAD_V // PARTS, COMPUTE, NATIVE)
            acc = tl.dot(small, v, accs[part] * decay[:, None], input_precision=PRECISION)  # type: ignore[misc]
            sums = sums + (acc,)  # type: ignore[assignment]  # noqa: RUF005
        accs = sums
        peak = new_peak
        ids = next_ids
    return accs, total * tl.math.exp2(-GAIN), peak


@triton.jit
def in_order(accs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """The parts of `attend_grouped` as one matrix, without its gain."""
    if BITS == 4:
        acc = tl.join(tl.join(accs[0], accs[2]), tl.join(accs[1], accs[3]))
    else:
        even = tl.join(tl.join(accs[0], accs[4]), tl.join(accs[2], accs[6]))
        odd = tl.join(tl.join(accs[1], accs[5]), tl.join(accs[3], accs[7]))
        acc = tl.join(even, odd)
    return tl.reshape(acc, [ROWS, COLUMNS]) * 0.00390625
