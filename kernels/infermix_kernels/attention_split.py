"""Attention of short queries: the context of a sequence is split over programs, a second kernel combines them."""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.attention_latent import attend_latent
from infermix_kernels.attention_quantized import PLAIN, attend_quantized
from infermix_kernels.attention_tile import (
    DENSE,
    attend,
    head_pool,
    initial_state,
    load_queries,
    normalise,
    rows_of,
    store_output,
)


@triton.jit
def place_of(first, second):
    """Coordinates of a program in a grid of one dimension: only that one may have more than 65,535 programs."""
    place = tl.program_id(0)
    return place % first, place // first % second, place // first // second


@triton.jit
def runs_of(
    query_len,
    context,
    row_tile,
    num_splits,
    window,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    GROUP_SIZE: tl.constexpr = 0,
    RECENT: tl.constexpr = 0,
):
    """The tokens `lo ... hi` that a row tile sees, whole tiles in each of its runs, and how many runs there are.

    With GROUP_SIZE, only those of them that are in whole groups older than the last RECENT tokens of the context.
    """
    first_row = row_tile * TOKENS
    first_new = context - query_len
    hi = context
    if not TREE:
        hi = tl.minimum(first_new + tl.minimum(first_row + TOKENS, query_len), context)
    if GROUP_SIZE:
        hi = tl.minimum(hi, tl.maximum(context - RECENT, 0) // GROUP_SIZE * GROUP_SIZE)
    lo = 0
    if WINDOW:
        lo = tl.maximum(first_new + first_row - window + 1, 0) // BLOCK_N * BLOCK_N
    tiles = tl.maximum(tl.cdiv(hi - lo, BLOCK_N), 1)
    tiles_per_run = tl.cdiv(tiles, num_splits)
    return lo, hi, tiles_per_run, tl.cdiv(tiles, tiles_per_run)


@triton.jit(
    do_not_specialize=["H", "head_tiles", "row_tiles", "num_splits", "window", "stride_table"],
    do_not_specialize_on_alignment=["cu_seqlens", "context_lens", "tables", "sinks", "tree_mask"],
)
def split_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    sums,
    stats,
    cu_seqlens,
    context_lens,
    tables,
    sinks,
    tree_mask,
    H,
    head_tiles,
    row_tiles,
    num_splits,
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
    TREE: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Grid: head tiles, so that neighbours read the same tokens, x splits x row tiles x sequences.

    A sequence is cut into as many equal runs of whole tiles as there are splits, fewer when it is short. One run is
    written out at once; of several, each leaves its partial result in its slot for `combine_kernel`. PDL: this kernel
    and the next may be launched while the one before drains, and wait here for its results.
    SHARED: values are the first DV numbers of keys, and PAD_K is the padded width of the others.
    """
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    if SAME_STRIDES:
        stride_vb, stride_vt = stride_kb, stride_kt
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
        query_len, context, row_tile, num_splits, window, TOKENS, BLOCK_N, WINDOW, TREE
    )
    if (split >= active) | (row_tile * TOKENS >= query_len):
        return

    token, head, in_tile = rows_of(row_tile, head_tile, BLOCK_M, HEADS)
    valid = in_tile & (token < query_len)
    if SHARED:
        query = load_queries(q, first_token, token, head, valid, stride_qt, stride_qh, DV, PAD_V)
        q_rest = load_queries(q + DV, first_token, token, head, valid, stride_qt, stride_qh, DK - DV, PAD_K)
    else:
        query = load_queries(q, first_token, token, head, valid, stride_qt, stride_qh, DK, PAD_K)
    acc, total, peak = initial_state(sinks, head, valid, split == 0, BLOCK_M, PAD_V, SINKS)
    q_pos = first_new + token
    tree_bits = q_pos
    if TREE:
        tree_bits = tl.load(tree_mask + first_token + token, mask=valid, other=0)

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
    begin = lo + split * tiles_per_split * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, hi)
    if FORMAT != PLAIN:
        acc, total, peak = attend_quantized(
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
            begin,
            end,
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
            TREE,
            FORMAT,
            COMPUTE,
            PRECISION,
            WIDE,
            NATIVE,
            BLOCK_M <= 32,
        )
    elif SHARED:
        acc, total, peak = attend_latent(
            acc,
            total,
            peak,
            query,
            q_rest,
            q_pos,
            tree_bits,
            first_new,
            keys,
            table,
            begin,
            end,
            context,
            factor,
            cap,
            window,
            stride_kb,
            stride_kt,
            DK,
            DV,
            PAD_K,
            PAD_V,
            BLOCK_N,
            BLOCK_SIZE,
            ADDRESSING,
            WINDOW,
            SOFTCAP,
            TREE,
            PRECISION,
            WIDE,
        )
    else:
        acc, total, peak = attend(
            acc,
            total,
            peak,
            query,
            q_pos,
            tree_bits,
            first_new,
            keys,
            values,
            table,
            begin,
            end,
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
            TREE,
            PRECISION,
            WIDE,
            BLOCK_M <= 32,
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


@triton.jit(
    do_not_specialize=["H", "head_tiles", "row_tiles", "num_splits", "window"],
    do_not_specialize_on_alignment=["cu_seqlens", "context_lens"],
)
def combine_kernel(
    out,
    sums,
    stats,
    cu_seqlens,
    context_lens,
    H,
    head_tiles,
    row_tiles,
    num_splits,
    window,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    PAD_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAD_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    RECENT: tl.constexpr,
):
    """Adds up the runs of one query row and head. Grid: head tiles x rows of a tile x row tiles x sequences."""
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    ROWS: tl.constexpr = TOKENS * HEADS
    row, head_tile, tile = place_of(ROWS, head_tiles)
    seq = tile // row_tiles
    row_tile = tile % row_tiles
    first_token = tl.load(cu_seqlens + seq)
    query_len = tl.load(cu_seqlens + seq + 1) - first_token
    context = tl.load(context_lens + seq)
    _lo, _hi, _tiles, active = runs_of(
        query_len, context, row_tile, num_splits, window, TOKENS, BLOCK_N, WINDOW, TREE, GROUP_SIZE, RECENT
    )
    token = row_tile * TOKENS + row // HEADS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (active > 1) & (token < query_len):
        runs = tl.arange(0, PAD_SPLITS)
        dims = tl.arange(0, PAD_V)
        slots = ((tile * head_tiles + head_tile) * num_splits + runs).to(tl.int64)
        there = runs < active
        peaks = tl.load(stats + slots * (2 * BLOCK_M) + row, mask=there, other=float("-inf"))
        totals = tl.load(stats + slots * (2 * BLOCK_M) + BLOCK_M + row, mask=there, other=0.0)
        mask = there[:, None] & (dims[None, :] < DV)
        parts = tl.load(sums + ((slots * BLOCK_M + row) * DV)[:, None] + dims[None, :], mask=mask, other=0.0)
        peak = tl.max(peaks, 0)
        weights = tl.math.exp2(peaks - tl.where(peak == float("-inf"), 0.0, peak))
        total = tl.sum(totals * weights, 0)
        acc = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
        head = head_tile * HEADS + row % HEADS
        target = ((first_token + token).to(tl.int64) * H + head) * DV
        tl.store(out + target + dims, acc.to(out.dtype.element_ty), mask=dims < DV)
