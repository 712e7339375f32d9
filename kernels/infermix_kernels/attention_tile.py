"""What the attention kernels are made of: the rows of a program, where its tokens lie, one pass over key tiles."""

from __future__ import annotations

import triton
import triton.language as tl

#: How a tile of tokens lies in memory: a run of one row per sequence, a run inside one block, several whole blocks,
#: tokens that straddle blocks of any size, or one block per sequence that is written round and round.
DENSE = tl.constexpr(0)
TILE_IN_BLOCK = tl.constexpr(1)
BLOCKS_IN_TILE = tl.constexpr(2)
STRADDLING = tl.constexpr(3)
RING = tl.constexpr(4)


@triton.jit
def rows_of(row_tile, head_tile, BLOCK_M: tl.constexpr, HEADS: tl.constexpr):
    """Query tokens and heads of a tile: HEADS query heads of one KV head side by side, then the next token."""
    rows = tl.arange(0, BLOCK_M)
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    token = row_tile * TOKENS + rows // HEADS
    head = head_tile * HEADS + rows % HEADS
    return token, head, rows < TOKENS * HEADS


@triton.jit
def load_queries(q, first_token, token, head, valid, stride_qt, stride_qh, DK: tl.constexpr, PAD_K: tl.constexpr):
    dims = tl.arange(0, PAD_K)
    rows = (first_token + token).to(tl.int64) * stride_qt + head * stride_qh
    return tl.load(q + rows[:, None] + dims[None, :], mask=valid[:, None] & (dims[None, :] < DK), other=0.0)


@triton.jit
def store_output(out, acc, first_token, token, head, valid, H, DV: tl.constexpr, PAD_V: tl.constexpr):
    dims = tl.arange(0, PAD_V)
    rows = ((first_token + token).to(tl.int64) * H + head) * DV
    mask = valid[:, None] & (dims[None, :] < DV)
    tl.store(out + rows[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def initial_state(sinks, head, valid, with_sinks, BLOCK_M: tl.constexpr, PAD_V: tl.constexpr, SINKS: tl.constexpr):
    """Accumulator, sum of weights and largest score (base 2); a sink is a score that brings no value."""
    acc = tl.zeros([BLOCK_M, PAD_V], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if SINKS:  # noqa: SIM102 (a constant outside, a value inside)
        if with_sinks:
            peak = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
            total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    return acc, total, peak


@triton.jit
def normalise(acc, total):
    """Weights sum to one; rows that saw nothing are zeros."""
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def head_pool(pool, kv_head, row, stride_head, stride_block, ADDRESSING: tl.constexpr):
    """The pool as one KV head sees it; of a dense one, the sequence's own row."""
    if ADDRESSING == DENSE:
        return pool + (kv_head * stride_head + row * stride_block)
    else:
        return pool + kv_head * stride_head


@triton.jit
def block_ids(table, start, context, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, ADDRESSING: tl.constexpr):
    """Ids of the blocks that hold tokens `start ... start + BLOCK_N`: none, one, or one per token."""
    if ADDRESSING == DENSE:
        return start * 0
    elif ADDRESSING == RING:
        return tl.load(table)
    elif ADDRESSING == TILE_IN_BLOCK:
        return tl.load(table + start // BLOCK_SIZE, mask=start < context, other=0)
    elif ADDRESSING == BLOCKS_IN_TILE:
        tokens = tl.arange(0, BLOCK_N)
        return tl.load(table + start // BLOCK_SIZE + tokens // BLOCK_SIZE, mask=start + tokens < context, other=0)
    else:
        tokens = start + tl.arange(0, BLOCK_N)
        return tl.load(table + tokens // BLOCK_SIZE, mask=tokens < context, other=0)


@triton.jit
def tile_pointers(
    pool,
    ids,
    start,
    stride_block,
    stride_token,
    PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ADDRESSING: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Addresses `[BLOCK_N, PAD]` of a tile of keys or values, invariant but for a scalar where the layout allows.

    Offsets are 32-bit numbers unless the pool is WIDE: addresses take a third of the registers and instructions.
    """
    tokens = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, PAD)
    if ADDRESSING == DENSE:
        base = pool + start.to(tl.int64) * stride_token
        return base + (tokens[:, None] * stride_token + dims[None, :])
    elif ADDRESSING == TILE_IN_BLOCK:
        base = pool + ids.to(tl.int64) * stride_block + (start % BLOCK_SIZE) * stride_token
        return base + (tokens[:, None] * stride_token + dims[None, :])
    elif ADDRESSING == RING:
        base = pool + ids.to(tl.int64) * stride_block
        return base + (((start + tokens) % BLOCK_SIZE)[:, None] * stride_token + dims[None, :])
    elif ADDRESSING == BLOCKS_IN_TILE:
        within = (tokens % BLOCK_SIZE)[:, None] * stride_token + dims[None, :]
        blocks = ids.to(tl.int64) if WIDE else ids
        return pool + ((blocks * stride_block)[:, None] + within)
    else:
        within = ((start + tokens) % BLOCK_SIZE)[:, None] * stride_token + dims[None, :]
        blocks = ids.to(tl.int64) if WIDE else ids
        return pool + ((blocks * stride_block)[:, None] + within)


@triton.jit
def load_tile(pointers, inside, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """Tokens outside the context and padded columns read as zeros, whatever memory holds there."""
    if MASKED:
        mask = inside[:, None]
        if DIM != PAD:
            mask = mask & (tl.arange(0, PAD) < DIM)[None, :]
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        if DIM != PAD:
            return tl.load(pointers, mask=(tl.arange(0, PAD) < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def load_scales(
    scales,
    ids,
    start,
    inside,
    stride_block,
    stride_token,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ADDRESSING: tl.constexpr,
):
    tokens = tl.arange(0, BLOCK_N)
    if ADDRESSING == DENSE:
        rows = (start + tokens).to(tl.int64) * stride_token
    else:
        rows = ids.to(tl.int64) * stride_block + ((start + tokens) % BLOCK_SIZE) * stride_token
    return tl.load(scales + rows, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def visible_keys(position, q_pos, tree_bits, first_new, context, window, WINDOW: tl.constexpr, TREE: tl.constexpr):
    """`[BLOCK_M, BLOCK_N]`: causal, or what the tree says about new tokens; inside the window and the context."""
    if TREE:
        offset = tl.minimum(tl.maximum(position - first_new, 0), 63).to(tl.int64)
        chosen = ((tree_bits[:, None] >> offset[None, :]) & 1) != 0
        visible = ((position < first_new)[None, :] | chosen) & (position < context)[None, :]
    else:
        visible = position[None, :] <= q_pos[:, None]
    if WINDOW:
        visible = visible & (position[None, :] > q_pos[:, None] - window)
    return visible


@triton.jit
def attend(
    acc,
    total,
    peak,
    q,
    q_pos,
    tree_bits,
    first_new,
    keys,
    values,
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
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ADDRESSING: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    LATE_SUMS: tl.constexpr,
):
    """Online softmax over the tokens `lo ... hi` (`lo` a multiple of BLOCK_N).

    Scores are kept in base 2: `factor` is scale * log2(e), `cap` softcap * log2(e). Without MASKED, every key of
    every tile is visible to every row. Keys outside the context may be anything (they lie in block 0, or past the end
    of a dense row, where they are not read): their scores are replaced. Values there must be zeros, since 0 x NaN is
    NaN.
    """
    late = tl.zeros([acc.shape[0], BLOCK_N], dtype=tl.float32)
    ids = block_ids(table, lo, context, BLOCK_N, BLOCK_SIZE, ADDRESSING)
    for tile in tl.range(0, tl.cdiv(hi - lo, BLOCK_N)):
        start = lo + tile * BLOCK_N
        next_ids = block_ids(table, start + BLOCK_N, context, BLOCK_N, BLOCK_SIZE, ADDRESSING)
        position = start + tl.arange(0, BLOCK_N)
        inside = position < context

        k = load_tile(
            tile_pointers(keys, ids, start, stride_kb, stride_kt, PAD_K, BLOCK_N, BLOCK_SIZE, ADDRESSING, WIDE),
            inside,
            DK,
            PAD_K,
            MASKED and ADDRESSING == DENSE,
        )
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP:
            scores = cap * (1.0 - 2.0 / (tl.math.exp2(scores * (factor * 2.8853900817779268 / cap)) + 1.0))
            gain = 1.0
        else:
            gain = factor
        if MASKED:
            visible = visible_keys(position, q_pos, tree_bits, first_new, context, window, WINDOW, TREE)
            scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1) * gain)
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        weights = tl.math.exp2(scores * gain - anchor[:, None])
        decay = tl.math.exp2(peak - anchor)
        if LATE_SUMS:
            total = total * decay
            late = late * decay[:, None] + weights
        else:
            total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        v = load_tile(
            tile_pointers(values, ids, start, stride_vb, stride_vt, PAD_V, BLOCK_N, BLOCK_SIZE, ADDRESSING, WIDE),
            inside,
            DV,
            PAD_V,
            MASKED,
        )
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak
        ids = next_ids
    if LATE_SUMS:
        total += tl.sum(late, 1)
    return acc, total, peak


@triton.jit
def attend_described(
    acc,
    total,
    peak,
    q,
    key_desc,
    value_desc,
    table,
    first_row,
    key_column,
    value_column,
    hi,
    factor,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ADDRESSING: tl.constexpr,
):
    """Online softmax over the tokens `0 ... hi`, all of them visible, read through the copy engine.

    The descriptors see pools as matrices with a row per token slot and a column per head and dimension; a tile lies
    within one block. Dense rows start at `first_row`.
    """
    block = block_ids(table, 0, hi, BLOCK_N, BLOCK_SIZE, ADDRESSING)
    for tile in tl.range(0, hi // BLOCK_N):
        start = tile * BLOCK_N
        next_block = block_ids(table, start + BLOCK_N, hi, BLOCK_N, BLOCK_SIZE, ADDRESSING)
        row = first_row + start if ADDRESSING == DENSE else block * BLOCK_SIZE + start % BLOCK_SIZE
        scores = tl.dot(q, tl.trans(key_desc.load([row, key_column])))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        weights = tl.math.exp2(scores * factor - new_peak[:, None])
        decay = tl.math.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(q.dtype), value_desc.load([row, value_column]), acc)
        peak = new_peak
        block = next_block
    return acc, total, peak
