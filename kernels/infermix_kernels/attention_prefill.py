"""Attention of long queries: one program per tile of query rows, over everything that the rows may see."""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.attention_quantized import PLAIN, attend_quantized
from infermix_kernels.attention_tile import (
    DENSE,
    attend,
    attend_described,
    head_pool,
    initial_state,
    load_queries,
    normalise,
    rows_of,
    store_output,
)


@triton.jit
def find_sequence(cu_seqlens, tile, num_seqs, TOKENS: tl.constexpr):
    """Sequence that owns a tile when sequence i starts at tile `cu_seqlens[i] // TOKENS + i`, and its tile number.

    Every sequence gets at least the tiles that it needs, and the number of tiles depends on the number of tokens and
    sequences only, so that the launch grid needs nothing from the device.
    """
    first = tl.load(cu_seqlens)
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        begin = (tl.load(cu_seqlens + middle) - first) // TOKENS + middle
        low = tl.where(begin <= tile, middle, low)
        high = tl.where(begin <= tile, high, middle - 1)
    begin = (tl.load(cu_seqlens + low) - first) // TOKENS + low
    return low, tile - begin


@triton.jit(
    do_not_specialize=["num_seqs", "H", "window", "stride_table"],
    do_not_specialize_on_alignment=["cu_seqlens", "context_lens", "tables", "sinks"],
)
def prefill_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    key_desc,
    value_desc,
    cu_seqlens,
    context_lens,
    tables,
    sinks,
    num_seqs,
    H,
    factor,
    cap,
    window,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_sb,
    stride_st,
    stride_sh,
    stride_table,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
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
    SINKS: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Grid: (tiles of query rows, groups of HEADS heads). The last tiles see most and are started first."""
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    if SAME_STRIDES:
        stride_vb, stride_vt = stride_kb, stride_kt
    head_tile = tl.program_id(1)
    seq, row_tile = find_sequence(cu_seqlens, tl.num_programs(0) - 1 - tl.program_id(0), num_seqs, TOKENS)
    first_token = tl.load(cu_seqlens + seq)
    query_len = tl.load(cu_seqlens + seq + 1) - first_token
    if row_tile * TOKENS >= query_len:
        return
    context = tl.load(context_lens + seq)
    first_new = context - query_len
    token, head, in_tile = rows_of(row_tile, head_tile, BLOCK_M, HEADS)
    valid = in_tile & (token < query_len)
    query = load_queries(q, first_token, token, head, valid, stride_qt, stride_qh, DK, PAD_K)
    acc, total, peak = initial_state(sinks, head, valid, True, BLOCK_M, PAD_V, SINKS)

    kv_head = (head_tile * HEADS // GROUP).to(tl.int64)
    row = seq.to(tl.int64)
    keys = head_pool(keys, kv_head, row, stride_kh, stride_kb, ADDRESSING)
    values = head_pool(values, kv_head, row, stride_vh, stride_vb, ADDRESSING)
    table = tables
    if ADDRESSING != DENSE:
        table = tables + row * stride_table
    if FORMAT != PLAIN:
        key_scales = head_pool(key_scales, kv_head, row, stride_sh, stride_sb, ADDRESSING)
        value_scales = head_pool(value_scales, kv_head, row, stride_sh, stride_sb, ADDRESSING)

    q_pos = first_new + token
    nearest = first_new + row_tile * TOKENS
    hi = tl.minimum(first_new + tl.minimum((row_tile + 1) * TOKENS, query_len), context)
    lo = 0
    if WINDOW:
        lo = tl.maximum(nearest - window + 1, 0) // BLOCK_N * BLOCK_N
    if FORMAT != PLAIN:
        acc, total, peak = attend_quantized(
            total,
            peak,
            query,
            q_pos,
            q_pos,
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
            DK,
            DV,
            PAD_K,
            PAD_V,
            BLOCK_M,
            BLOCK_N,
            BLOCK_SIZE,
            ADDRESSING,
            WINDOW,
            SOFTCAP,
            False,
            FORMAT,
            COMPUTE,
            PRECISION,
            WIDE,
            NATIVE,
            False,
        )
    else:
        masked_from = lo
        if not WINDOW:
            masked_from = tl.maximum(tl.minimum(nearest + 1, hi), 0) // BLOCK_N * BLOCK_N
            if DESCRIBED:
                acc, total, peak = attend_described(
                    acc,
                    total,
                    peak,
                    query,
                    key_desc,
                    value_desc,
                    table,
                    seq * (stride_kb // stride_kt),
                    head_tile * HEADS // GROUP * DK,
                    head_tile * HEADS // GROUP * DV,
                    masked_from,
                    factor,
                    BLOCK_N,
                    BLOCK_SIZE,
                    ADDRESSING,
                )
            else:
                acc, total, peak = attend(
                    acc,
                    total,
                    peak,
                    query,
                    q_pos,
                    q_pos,
                    first_new,
                    keys,
                    values,
                    table,
                    lo,
                    masked_from,
                    context,
                    factor,
                    cap,
                    window,
                    stride_kb,
                    stride_kt,
                    stride_vb,
                    stride_vt,
                    DK,
                    DV,
                    PAD_K,
                    PAD_V,
                    BLOCK_N,
                    BLOCK_SIZE,
                    ADDRESSING,
                    False,
                    WINDOW,
                    SOFTCAP,
                    False,
                    PRECISION,
                    WIDE,
                    False,
                )
        acc, total, peak = attend(
            acc,
            total,
            peak,
            query,
            q_pos,
            q_pos,
            first_new,
            keys,
            values,
            table,
            masked_from,
            hi,
            context,
            factor,
            cap,
            window,
            stride_kb,
            stride_kt,
            stride_vb,
            stride_vt,
            DK,
            DV,
            PAD_K,
            PAD_V,
            BLOCK_N,
            BLOCK_SIZE,
            ADDRESSING,
            True,
            WINDOW,
            SOFTCAP,
            False,
            PRECISION,
            WIDE,
            False,
        )
    acc = normalise(acc, total)
    store_output(out, acc, first_token, token, head, valid, H, DV, PAD_V)
