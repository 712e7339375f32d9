"""First half of sampling: many programs per row find out which tokens can survive the filters, and list those.

Tokens are counted in bins of their distance to the most likely one, in octaves of probability. Counts bound the mass
of every bin from both sides, which is enough to say which bins top-k, top-p and min-p certainly drop.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Mass of the most likely token (2**44): 2**18 such tokens still fit into 62 bits.
UNIT = tl.constexpr(17592186044416.0)
#: Bins, over 44 octaves below the most likely token; what is farther away has no mass and lies in the last bin.
BINS = tl.constexpr(1024)
OCTAVES = tl.constexpr(44.0)
#: Covers the rounding of sums in fp32: a bin is dropped only when it is clear that it must be.
_SLACK = tl.constexpr(1e-4)


@triton.jit
def mass_of(values, peak, sharpness):
    """Fixed-point probabilities relative to the most likely token; `sharpness` is log2(e) / temperature."""
    return (tl.exp2((values - peak) * sharpness) * UNIT).to(tl.int64)


@triton.jit
def bin_of(values, peak, sharpness):
    distance = (peak - values) * (sharpness * (BINS / OCTAVES))
    return tl.where(distance < BINS - 1, distance, BINS - 1.0).to(tl.int32)


@triton.jit
def row_peak(peaks, row, num_parts, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    return tl.max(tl.load(peaks + row * num_parts + parts, mask=parts < num_parts, other=float("-inf")), axis=0)


@triton.jit
def count_limit(row, top_ks, width):
    """Top-k of a row, 0 when it keeps everything."""
    top_k = tl.load(top_ks + row)
    return tl.where(top_k < width, top_k, 0).to(tl.int64)


@triton.jit
def is_filtered(row, top_k, top_ps, min_ps):
    unlimited = (top_k <= 0) & (tl.load(top_ps + row) >= 1.0) & (tl.load(min_ps + row) <= 0.0)
    return unlimited == 0


@triton.jit
def count_kernel(
    logits, temperatures, peaks, masses, counts, width, part_width, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: (rows, parts). Counts of a part per bin `[rows, parts, BINS]`, and its mass `[rows, parts]`."""
    row, part = tl.program_id(0), tl.program_id(1)
    num_parts = tl.num_programs(1)
    temperature = tl.load(temperatures + row).to(tl.float32)
    if temperature > 0.0:
        peak = row_peak(peaks, row, num_parts, PARTS)
        sharpness = 1.4426950408889634 / temperature
        logits += row.to(tl.int64) * stride
        end = tl.minimum((part + 1) * part_width, width)
        cols = tl.arange(0, BLOCK)
        histogram = tl.zeros([BINS], tl.int32)
        mass = tl.zeros([BLOCK], tl.int64)
        for start in range(part * part_width, end, BLOCK):
            inside = start + cols < end
            values = tl.load(logits + start + cols, mask=inside, other=float("-inf")).to(tl.float32)
            histogram += tl.histogram(bin_of(values, peak, sharpness), BINS)
            mass += mass_of(values, peak, sharpness)
        tl.store(counts + (row * num_parts + part) * BINS + tl.arange(0, BINS), histogram)
        tl.store(masses + row * num_parts + part, tl.sum(mass, axis=0))


@triton.jit
def bins_kept(total, top_k, top_p, min_p):
    """How many bins, from the top, hold tokens that may survive; at least one.

    With top-k, all of what it keeps: its mass is what top-p refers to.
    """
    bins = tl.arange(0, BINS)
    above = tl.cumsum(total, axis=0) - total
    most = tl.exp2(bins * (-OCTAVES / BINS))
    least = tl.exp2((bins + 1) * (-OCTAVES / BINS)) * total.to(tl.float32)
    reach = top_p * tl.sum(most * total.to(tl.float32), axis=0) * (1.0 + _SLACK)
    by_mass = tl.cumsum(least, axis=0) - least < tl.where(top_p < 1.0, reach, float("inf"))
    by_mass = by_mass & (most * (1.0 + _SLACK) >= min_p)
    kept = tl.where(top_k > 0, above < top_k, by_mass) & (bins < BINS - 1)
    return tl.maximum(tl.max(tl.where(kept, bins + 1, 0), axis=0), 1)


@triton.jit
def list_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, peaks, counts, values_out, ids_out, lengths, width, part_width,
    stride, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, parts). Values and ids of the tokens that may survive, `[rows, width]` in the order of ids."""
    row, part = tl.program_id(0), tl.program_id(1)
    num_parts = tl.num_programs(1)
    temperature = tl.load(temperatures + row).to(tl.float32)
    top_k = count_limit(row, top_ks, width)
    filtered = is_filtered(row, top_k, top_ps, min_ps)
    if (temperature > 0.0) & filtered:
        bins = tl.arange(0, BINS)
        total = tl.zeros([BINS], tl.int32)
        earlier = tl.zeros([BINS], tl.int32)
        for other in tl.range(0, num_parts, loop_unroll_factor=8):
            part_counts = tl.load(counts + (row * num_parts + other) * BINS + bins)
            total += part_counts
            earlier += tl.where(other < part, part_counts, 0)
        top_p, min_p = tl.load(top_ps + row).to(tl.float32), tl.load(min_ps + row).to(tl.float32)
        limit = bins_kept(total, top_k, top_p, min_p)
        position = tl.sum(tl.where(bins < limit, earlier, 0), axis=0)
        if part == 0:
            tl.store(lengths + row, tl.sum(tl.where(bins < limit, total, 0), axis=0))
        peak = row_peak(peaks, row, num_parts, PARTS)
        sharpness = 1.4426950408889634 / temperature
        logits += row.to(tl.int64) * stride
        out = row.to(tl.int64) * width
        end = tl.minimum((part + 1) * part_width, width)
        cols = tl.arange(0, BLOCK)
        for start in range(part * part_width, end, BLOCK):
            inside = start + cols < end
            values = tl.load(logits + start + cols, mask=inside, other=float("-inf")).to(tl.float32)
            kept = tl.where(bin_of(values, peak, sharpness) < limit, 1, 0)
            at = out + position + tl.cumsum(kept, axis=0) - 1
            tl.store(values_out + at, values, mask=kept > 0)
            tl.store(ids_out + at, start + cols, mask=kept > 0)
            position += tl.sum(kept, axis=0)
