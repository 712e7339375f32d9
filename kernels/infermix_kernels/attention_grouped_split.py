"""Attention over groups of 4- or 2-bit tokens and a full-precision tail: one kernel for every query length.

The arrangement is KIVI's (Liu et al. 2024, arXiv:2402.02750). Quantized tokens are split over programs as in
`attention_split`, whose `combine_kernel` adds the runs up; the last program of a row tile attends to the tail too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.attention_grouped_tile import attend_grouped, load_part
from infermix_kernels.attention_split import place_of, runs_of
from infermix_kernels.attention_tile import (
    RING,
    attend,
    initial_state,
    load_queries,
    normalise,
    rows_of,
    store_output,
)


@triton.jit(
    do_not_specialize=["H", "head_tiles", "row_tiles", "num_splits", "window", "stride_table", "stride_row"],
    do_not_specialize_on_alignment=["cu_seqlens", "context_lens", "tables", "tail_rows", "sinks"],
)
def grouped_kernel(
    q,
    keys,
    values,
    key_factors,
    value_factors,
    tail_keys,
    tail_values,
    out,
    sums,
    stats,
    cu_seqlens,
    context_lens,
    tables,
    tail_rows,
    sinks,
    H,
    head_tiles,
    row_tiles,
    num_splits,
    factor,
    cap,
    window,
    stride_qt,
    stride_qh,
    stride_table,
    stride_row,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    RECENT: tl.constexpr,
    BITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Grid: head tiles x splits x row tiles x sequences, as `split_kernel`. Pools are contiguous int32 words."""
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    PARTS: tl.constexpr = 16 // BITS
    if PDL:
        tl.extra.cuda.gdc_wait()
    head_tile, split, tile = place_of(head_tiles, num_splits)
    seq = tile // row_tiles
    row_tile = tile % row_tiles
    first_token = tl.load(cu_seqlens + seq)
    query_len = tl.load(cu_seqlens + seq + 1) - first_token
    context = tl.load(context_lens + seq)
    first_new = context - query_len

    lo, hi, tiles_per_split, active = runs_of(
        query_len, context, row_tile, num_splits, window, TOKENS, BLOCK_N, WINDOW, False, GROUP_SIZE, RECENT
    )
    if (split >= active) | (row_tile * TOKENS >= query_len):
        return

    token, head, in_tile = rows_of(row_tile, head_tile, BLOCK_M, HEADS)
    valid = in_tile & (token < query_len)
    query = load_queries(q, first_token, token, head, valid, stride_qt, stride_qh, DK, PAD_K)
    largest = tl.max(tl.abs(query.to(tl.float32)), 1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    queries = ()
    for part in tl.static_range(PARTS):
        columns = load_part(
            q, first_token, token, head, valid, largest, stride_qt, stride_qh, part, PARTS, DK, PAD_K, COMPUTE
        )
        queries = queries + (columns,)  # type: ignore[assignment]  # noqa: RUF005
    acc, total, peak = initial_state(sinks, head, valid, split == 0, BLOCK_M, PAD_V, SINKS)
    q_pos = first_new + token
    kv_head = (head_tile * HEADS // GROUP).to(tl.int64)
    row = seq.to(tl.int64)
    begin = lo + split * tiles_per_split * BLOCK_N
    acc, total, peak = attend_grouped(
        total,
        peak,
        queries,
        largest * factor,
        q_pos,
        first_new,
        keys,
        values,
        key_factors,
        value_factors,
        tables + row * stride_table,
        kv_head,
        begin,
        tl.minimum(begin + tiles_per_split * BLOCK_N, hi),
        context,
        cap,
        window,
        HKV,
        DK,
        DV,
        PAD_K,
        PAD_V,
        BLOCK_M,
        BLOCK_N,
        BLOCK_SIZE,
        GROUP_SIZE,
        BITS,
        WINDOW,
        SOFTCAP,
        COMPUTE,
        PRECISION,
        NATIVE,
    )
    if split == active - 1:
        # Loaded again: it would keep registers busy in the loop above.
        query = load_queries(q, first_token, token, head, valid, stride_qt, stride_qh, DK, PAD_K)
        flushed = tl.maximum(context - RECENT, 0) // GROUP_SIZE * GROUP_SIZE
        acc, total, peak = attend(
            acc,
            total,
            peak,
            query,
            q_pos,
            q_pos,
            first_new,
            tail_keys + kv_head * DK,
            tail_values + kv_head * DV,
            tail_rows + row * stride_row,
            tl.maximum(lo, flushed),
            tl.minimum(first_new + tl.minimum((row_tile + 1) * TOKENS, query_len), context),
            context,
            factor,
            cap,
            window,
            CAPACITY * HKV * DK,
            HKV * DK,
            CAPACITY * HKV * DV,
            HKV * DV,
            DK,
            DV,
            PAD_K,
            PAD_V,
            BLOCK_N,
            CAPACITY,
            RING,
            True,
            WINDOW,
            SOFTCAP,
            False,
            PRECISION,
            False,
            False,
        )
    if SPLIT:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        if active > 1:
            unit = tile * head_tiles + head_tile
            slot = (unit * num_splits + split).to(tl.int64)
            rows = tl.arange(0, BLOCK_M)
            dims = tl.arange(0, PAD_V)
            mask = valid[:, None] & (dims[None, :] < DV)
            tl.store(stats + slot * (2 * BLOCK_M) + rows, peak, mask=valid)
            tl.store(stats + slot * (2 * BLOCK_M) + BLOCK_M + rows, total, mask=valid)
            tl.store(sums + (slot * BLOCK_M + rows[:, None]) * DV + dims[None, :], acc, mask=mask)
        else:
            store_output(out, normalise(acc, total), first_token, token, head, valid, H, DV, PAD_V)
    else:
        store_output(out, normalise(acc, total), first_token, token, head, valid, H, DV, PAD_V)
