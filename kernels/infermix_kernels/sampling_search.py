"""Second half of sampling: one program per row applies the filters exactly to the listed tokens, and draws.

A filter keeps the tokens at or above a value that is searched for: each round reads the list once, adds up the number
(or the mass) of the tokens at or above three values between the ends of a bracket, and narrows the bracket to what
really occurs in one quarter of it. Masses are fixed-point integers: sums do not depend on their order, so equal
inputs give equal draws however a row is cut into pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.sampling_parts import UNIT, count_limit, is_filtered, mass_of, row_peak


@triton.jit
def load_values(values, start, length, BLOCK: tl.constexpr):
    """A piece of the list in fp32, minus infinity beyond its end."""
    cols = start + tl.arange(0, BLOCK)
    return tl.load(values + cols, mask=cols < length, other=float("-inf")).to(tl.float32)


@triton.jit
def weight_of(values, peak, sharpness, COUNT: tl.constexpr):
    if COUNT:
        return tl.where(values > float("-inf"), 1, 0).to(tl.int64)
    else:
        return mass_of(values, peak, sharpness)


@triton.jit
def least_of(values, length, BLOCK: tl.constexpr):
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, length, BLOCK):
        piece = load_values(values, start, length, BLOCK)
        least = tl.minimum(least, tl.where(piece > float("-inf"), piece, float("inf")))
    return tl.min(least, axis=0)


@triton.jit
def find_threshold(
    values, length, peak, sharpness, low, high, target, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest value `v` in `[low, high]` with `weight(x >= v) >= target`, or `low`.

    `low` and `high` occur in the list, and so do the ends of the bracket after every round.
    """
    while low < high:
        step = (high - low) * 0.25
        c = high - step
        c = tl.where(c > low, c, high)
        b = tl.maximum(c - step, low)
        a = tl.maximum(b - step, low)
        at_a, at_b, at_c = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        from_a = tl.full([BLOCK], float("inf"), tl.float32)
        from_b, from_c = from_a, from_a
        under_a = tl.full([BLOCK], float("-inf"), tl.float32)
        under_b, under_c = under_a, under_a
        for start in range(0, length, BLOCK):
            piece = load_values(values, start, length, BLOCK)
            weight = weight_of(piece, peak, sharpness, COUNT)
            at_a += tl.where(piece >= a, weight, 0)
            at_b += tl.where(piece >= b, weight, 0)
            at_c += tl.where(piece >= c, weight, 0)
            from_a = tl.minimum(from_a, tl.where(piece >= a, piece, float("inf")))
            from_b = tl.minimum(from_b, tl.where(piece >= b, piece, float("inf")))
            from_c = tl.minimum(from_c, tl.where(piece >= c, piece, float("inf")))
            under_a = tl.maximum(under_a, tl.where(piece < a, piece, float("-inf")))
            under_b = tl.maximum(under_b, tl.where(piece < b, piece, float("-inf")))
            under_c = tl.maximum(under_c, tl.where(piece < c, piece, float("-inf")))
        if tl.sum(at_c, axis=0) >= target:
            low = tl.min(from_c, axis=0)
        elif tl.sum(at_b, axis=0) >= target:
            low, high = tl.min(from_b, axis=0), tl.max(under_c, axis=0)
        elif tl.sum(at_a, axis=0) >= target:
            low, high = tl.min(from_a, axis=0), tl.max(under_b, axis=0)
        else:
            high = tl.maximum(tl.max(under_a, axis=0), low)
    return low


@triton.jit
def tally(values, length, peak, sharpness, cut, BLOCK: tl.constexpr):
    """Number and mass of the tokens above `cut`, and number of those at it."""
    count = tl.zeros([BLOCK], tl.int64)
    mass = tl.zeros([BLOCK], tl.int64)
    ties = tl.zeros([BLOCK], tl.int64)
    for start in range(0, length, BLOCK):
        piece = load_values(values, start, length, BLOCK)
        above = piece > cut
        count += tl.where(above, 1, 0)
        mass += tl.where(above, mass_of(piece, peak, sharpness), 0)
        ties += tl.where(piece == cut, 1, 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.sum(ties, axis=0)


@triton.jit
def ties_of(values, start, length, cut, BLOCK: tl.constexpr):
    return tl.where(load_values(values, start, length, BLOCK) == cut, 1, 0).to(tl.int64)


@triton.jit
def place_of_tie(values, length, cut, rank, BLOCK: tl.constexpr):
    """Place in the list of the tie with `rank` (from 0) among the tokens whose value is `cut`."""
    start = length * 0
    seen = rank * 0
    here = tl.sum(ties_of(values, start, length, cut, BLOCK), axis=0)
    while (seen + here <= rank) & (start + BLOCK < length):
        seen += here
        start += BLOCK
        here = tl.sum(ties_of(values, start, length, cut, BLOCK), axis=0)
    order = seen + tl.cumsum(ties_of(values, start, length, cut, BLOCK), axis=0)
    return start + tl.sum(tl.where(order <= rank, 1, 0), axis=0)


@triton.jit
def kept_mass(values, start, length, peak, sharpness, cut, last_tie, least_mass, BLOCK: tl.constexpr):
    """Masses of a piece of the list, 0 for what the filters drop."""
    places = start + tl.arange(0, BLOCK)
    piece = load_values(values, start, length, BLOCK)
    mass = mass_of(piece, peak, sharpness)
    keep = (piece > cut) | ((piece == cut) & (places <= last_tie))
    return tl.where(keep & (mass >= least_mass), mass, 0)


@triton.jit
def place_at(values, length, peak, sharpness, cut, last_tie, least_mass, goal, BLOCK: tl.constexpr):
    """First place at which the kept mass so far exceeds `goal`."""
    begin = length * 0
    before = goal * 0
    piece = kept_mass(values, begin, length, peak, sharpness, cut, last_tie, least_mass, BLOCK)
    here = tl.sum(piece, axis=0)
    while (before + here <= goal) & (begin + BLOCK < length):
        before += here
        begin += BLOCK
        piece = kept_mass(values, begin, length, peak, sharpness, cut, last_tie, least_mass, BLOCK)
        here = tl.sum(piece, axis=0)
    passed = tl.where(before + tl.cumsum(piece, axis=0) <= goal, 1, 0)
    return tl.minimum(begin + tl.sum(passed, axis=0), length - 1)


@triton.jit
def point_in(total, noise):
    """The mass that a draw has to exceed: `noise` of the whole, below the whole."""
    return tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def apply_top_p(values, length, peak, sharpness, cut, allowed, whole, top_p, BLOCK: tl.constexpr):
    """Narrow (value, number of ties at it) to the smallest set whose mass reaches `top_p` of `whole`.

    `whole` is negative when it is the mass of what (cut, allowed) keeps.
    """
    _, mass, ties = tally(values, length, peak, sharpness, cut, BLOCK)
    single = mass_of(cut, peak, sharpness)
    if whole < 0:
        whole = mass + tl.minimum(allowed, ties) * single
    goal = top_p * whole.to(tl.float64)
    if mass.to(tl.float64) >= goal:
        target = tl.math.ceil(goal).to(tl.int64)
        cut = find_threshold(values, length, peak, sharpness, cut, peak, target, False, BLOCK)
        _, mass, allowed = tally(values, length, peak, sharpness, cut, BLOCK)
        single = mass_of(cut, peak, sharpness)
    needed = tl.math.ceil((goal - mass.to(tl.float64)) / tl.maximum(single, 1).to(tl.float64))
    needed = tl.minimum(needed, allowed.to(tl.float64)).to(tl.int64)
    return cut, tl.maximum(needed, 1)


@triton.jit
def draw_filtered(values, length, peak, sharpness, whole, top_k, top_p, min_p, noise, BLOCK: tl.constexpr):
    """Place in the list of the drawn token. `whole` is the mass of the row."""
    cut = least_of(values, length, BLOCK)
    allowed = length.to(tl.int64)
    if (top_k > 0) & (top_k < length):
        cut = find_threshold(values, length, peak, sharpness, cut, peak, top_k, True, BLOCK)
        above, _, ties = tally(values, length, peak, sharpness, cut, BLOCK)
        allowed = tl.minimum(ties, top_k - above)
    if top_p < 1.0:
        whole = tl.where(top_k > 0, -1, whole)
        cut, allowed = apply_top_p(values, length, peak, sharpness, cut, allowed, whole, top_p, BLOCK)
    last_tie = length
    if allowed < length:
        last_tie = place_of_tie(values, length, cut, allowed - 1, BLOCK)
    least_mass = (min_p * UNIT).to(tl.int64)
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, length, BLOCK):
        sums += kept_mass(values, start, length, peak, sharpness, cut, last_tie, least_mass, BLOCK)
    goal = point_in(tl.sum(sums, axis=0), noise)
    return place_at(values, length, peak, sharpness, cut, last_tie, least_mass, goal, BLOCK)


@triton.jit
def draw_from_parts(logits, part_masses, width, part_width, peak, sharpness, noise, BLOCK: tl.constexpr):
    """Token drawn from the whole row: the part in which the point lies, then the token in that part."""
    total = tl.sum(part_masses, axis=0)
    goal = point_in(total, noise)
    upto = tl.cumsum(part_masses, axis=0)
    part = tl.sum(tl.where(upto <= goal, 1, 0), axis=0)
    before = tl.sum(tl.where(upto <= goal, part_masses, 0), axis=0)
    begin = part * part_width
    length = tl.minimum(part_width, width - begin)
    place = place_at(
        logits + begin, length, peak, sharpness, float("-inf"), length, 0, goal - before, BLOCK
    )  # fmt: skip
    return begin + place


@triton.jit(do_not_specialize=["num_parts"])
def draw_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, noises, peaks, peak_ids, masses, values, ids, lengths, out,
    width, part_width, num_parts, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: rows."""
    row = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    temperature = tl.load(temperatures + row).to(tl.float32)
    peak = row_peak(peaks, row, num_parts, PARTS)
    if temperature <= 0.0:
        part_peaks = tl.load(peaks + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
        part_ids = tl.load(peak_ids + row * num_parts + parts, mask=parts < num_parts, other=0x7FFFFFFF)
        token = tl.min(tl.where(part_peaks == peak, part_ids, 0x7FFFFFFF), axis=0)
        tl.store(out + row, tl.minimum(token, width - 1).to(tl.int64))
    else:
        sharpness = 1.4426950408889634 / temperature
        noise = tl.load(noises + row).to(tl.float64)
        part_masses = tl.load(masses + row * num_parts + parts, mask=parts < num_parts, other=0)
        top_k = count_limit(row, top_ks, width)
        filtered = is_filtered(row, top_k, top_ps, min_ps)
        if filtered:
            top_p = tl.load(top_ps + row).to(tl.float64)
            min_p = tl.load(min_ps + row).to(tl.float64)
            offset = row.to(tl.int64) * width
            length = tl.load(lengths + row)
            whole = tl.sum(part_masses, axis=0)
            place = draw_filtered(values + offset, length, peak, sharpness, whole, top_k, top_p, min_p, noise, BLOCK)
            tl.store(out + row, tl.load(ids + offset + place).to(tl.int64))
        else:
            start = row.to(tl.int64) * stride
            token = draw_from_parts(
                logits + start, part_masses, width, part_width, peak, sharpness, noise, BLOCK
            )  # fmt: skip
            tl.store(out + row, token.to(tl.int64))
