"""One pass over rows whose first part is key and value at once: latent attention (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.attention_tile import DENSE, block_ids, load_tile, tile_pointers, visible_keys


@triton.jit
def attend_latent(
    acc,
    total,
    peak,
    q,
    q_rest,
    q_pos,
    tree_bits,
    first_new,
    rows,
    table,
    lo,
    hi,
    context,
    factor,
    cap,
    window,
    stride_block,
    stride_token,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAD_REST: tl.constexpr,
    PAD_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ADDRESSING: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """As `attention_tile.attend`, masked: the value of a row of DK numbers is its first DV, which are loaded once.

    `q_rest` is the part of the queries that meets the other DK - DV.
    """
    ids = block_ids(table, lo, context, BLOCK_N, BLOCK_SIZE, ADDRESSING)
    for tile in tl.range(0, tl.cdiv(hi - lo, BLOCK_N)):
        start = lo + tile * BLOCK_N
        next_ids = block_ids(table, start + BLOCK_N, context, BLOCK_N, BLOCK_SIZE, ADDRESSING)
        position = start + tl.arange(0, BLOCK_N)
        inside = position < context
        pointers = tile_pointers(
            rows, ids, start, stride_block, stride_token, PAD_V, BLOCK_N, BLOCK_SIZE, ADDRESSING, WIDE
        )
        latent = load_tile(pointers, inside, DV, PAD_V, True)
        pointers = tile_pointers(
            rows + DV, ids, start, stride_block, stride_token, PAD_REST, BLOCK_N, BLOCK_SIZE, ADDRESSING, WIDE
        )
        rest = load_tile(pointers, inside, DK - DV, PAD_REST, ADDRESSING == DENSE)
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision=PRECISION) * factor
        if SOFTCAP:
            scores = cap * (1.0 - 2.0 / (tl.math.exp2(scores * (2.8853900817779268 / cap)) + 1.0))
        visible = visible_keys(position, q_pos, tree_bits, first_new, context, window, WINDOW, TREE)
        scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.math.exp2(scores - anchor[:, None])
        decay = tl.math.exp2(peak - anchor)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), latent, acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
        ids = next_ids
    return acc, total, peak
