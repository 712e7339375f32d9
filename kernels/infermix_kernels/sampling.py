"""Sampling with top-k, top-p and min-p over the vocabulary, without sorting it.

A filter keeps the tokens at or above a value that is searched for: each round reads the row once, adds up the number
(or the mass) of the tokens at or above three values between the ends of a bracket, and narrows the bracket to what
really occurs in one quarter of it. Masses are fixed-point integers: sums do not depend on their order, so equal
inputs give equal draws however a row is cut into pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import require, require_device, require_floats, require_rows, require_vector
from infermix_kernels.greedy import argmax_of_row

#: Mass of the most likely token (2**44): 2**18 such tokens still fit into 62 bits.
_UNIT = tl.constexpr(17592186044416.0)
#: Pieces of a row that are read ahead: a row has only one multiprocessor to itself.
_UNROLL = tl.constexpr(4)
MAX_VOCABULARY = 1 << 18


@triton.jit
def load_values(logits, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A piece of the row in fp32, minus infinity beyond its end."""
    cols = start + tl.arange(0, BLOCK)
    return tl.load(logits + cols, mask=cols < WIDTH, other=float("-inf")).to(tl.float32)


@triton.jit
def mass_of(values, peak, sharpness):
    """Fixed-point probabilities relative to the most likely token; `sharpness` is log2(e) / temperature."""
    return (tl.exp2((values - peak) * sharpness) * _UNIT).to(tl.int64)


@triton.jit
def weight_of(values, peak, sharpness, COUNT: tl.constexpr):
    if COUNT:
        return tl.where(values > float("-inf"), 1, 0).to(tl.int64)
    else:
        return mass_of(values, peak, sharpness)


@triton.jit
def extent_of(logits, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Largest and smallest finite value of the row."""
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, loop_unroll_factor=_UNROLL):
        values = load_values(logits, start, WIDTH, BLOCK)
        most = tl.maximum(most, values)
        least = tl.minimum(least, tl.where(values > float("-inf"), values, float("inf")))
    return tl.max(most, axis=0), tl.min(least, axis=0)


@triton.jit
def find_threshold(
    logits, WIDTH: tl.constexpr, peak, sharpness, low, high, target, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest value `v` in `[low, high]` with `weight(x >= v) >= target`, or `low`.

    `low` and `high` occur in the row, and so do the ends of the bracket after every round.
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
        for start in tl.range(0, WIDTH, BLOCK, loop_unroll_factor=_UNROLL):
            values = load_values(logits, start, WIDTH, BLOCK)
            weight = weight_of(values, peak, sharpness, COUNT)
            at_a += tl.where(values >= a, weight, 0)
            at_b += tl.where(values >= b, weight, 0)
            at_c += tl.where(values >= c, weight, 0)
            from_a = tl.minimum(from_a, tl.where(values >= a, values, float("inf")))
            from_b = tl.minimum(from_b, tl.where(values >= b, values, float("inf")))
            from_c = tl.minimum(from_c, tl.where(values >= c, values, float("inf")))
            under_a = tl.maximum(under_a, tl.where(values < a, values, float("-inf")))
            under_b = tl.maximum(under_b, tl.where(values < b, values, float("-inf")))
            under_c = tl.maximum(under_c, tl.where(values < c, values, float("-inf")))
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
def tally(logits, WIDTH: tl.constexpr, peak, sharpness, cut, BLOCK: tl.constexpr):
    """Number and mass of the tokens above `cut`, and number of those at it."""
    count = tl.zeros([BLOCK], tl.int64)
    mass = tl.zeros([BLOCK], tl.int64)
    ties = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, WIDTH, BLOCK, loop_unroll_factor=_UNROLL):
        values = load_values(logits, start, WIDTH, BLOCK)
        above = values > cut
        count += tl.where(above, 1, 0)
        mass += tl.where(above, mass_of(values, peak, sharpness), 0)
        ties += tl.where(values == cut, 1, 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.sum(ties, axis=0)


@triton.jit
def id_of_tie(logits, WIDTH: tl.constexpr, cut, rank, BLOCK: tl.constexpr):
    """Token id of the tie with `rank` (from 0) among the tokens whose value is `cut`."""
    start = tl.full([], 0, tl.int32)
    seen = rank * 0
    here = tl.sum(tl.where(load_values(logits, start, WIDTH, BLOCK) == cut, 1, 0).to(tl.int64), axis=0)
    while (seen + here <= rank) & (start + BLOCK < WIDTH):
        seen += here
        start += BLOCK
        here = tl.sum(tl.where(load_values(logits, start, WIDTH, BLOCK) == cut, 1, 0).to(tl.int64), axis=0)
    order = seen + tl.cumsum(tl.where(load_values(logits, start, WIDTH, BLOCK) == cut, 1, 0).to(tl.int64), axis=0)
    return start + tl.sum(tl.where(order <= rank, 1, 0), axis=0)


@triton.jit
def kept_mass(logits, start, WIDTH: tl.constexpr, peak, sharpness, cut, last_tie, least_mass, BLOCK: tl.constexpr):
    """Masses of a piece of the row, 0 for what the filters drop."""
    cols = start + tl.arange(0, BLOCK)
    values = load_values(logits, start, WIDTH, BLOCK)
    mass = mass_of(values, peak, sharpness)
    keep = (values > cut) | ((values == cut) & (cols <= last_tie))
    return tl.where(keep & (mass >= least_mass), mass, 0)


@triton.jit
def draw_token(logits, WIDTH: tl.constexpr, peak, sharpness, cut, last_tie, least_mass, noise, BLOCK: tl.constexpr):
    """First token, in id order, at which the kept mass so far exceeds `noise` of the whole."""
    sums = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, WIDTH, BLOCK, loop_unroll_factor=_UNROLL):
        sums += kept_mass(logits, start, WIDTH, peak, sharpness, cut, last_tie, least_mass, BLOCK)
    total = tl.sum(sums, axis=0)
    goal = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    begin = tl.full([], 0, tl.int32)
    before = goal * 0
    piece = kept_mass(logits, begin, WIDTH, peak, sharpness, cut, last_tie, least_mass, BLOCK)
    here = tl.sum(piece, axis=0)
    while (before + here <= goal) & (begin + BLOCK < WIDTH):
        before += here
        begin += BLOCK
        piece = kept_mass(logits, begin, WIDTH, peak, sharpness, cut, last_tie, least_mass, BLOCK)
        here = tl.sum(piece, axis=0)
    passed = tl.where(before + tl.cumsum(piece, axis=0) <= goal, 1, 0)
    return tl.minimum(begin + tl.sum(passed, axis=0), WIDTH - 1)


@triton.jit
def apply_top_p(logits, WIDTH: tl.constexpr, peak, sharpness, cut, allowed, top_p, BLOCK: tl.constexpr):
    """Narrow (value, number of ties at it) to the smallest set whose mass reaches `top_p` of what it was."""
    _, mass, ties = tally(logits, WIDTH, peak, sharpness, cut, BLOCK)
    single = mass_of(cut, peak, sharpness)
    goal = top_p * (mass + tl.minimum(allowed, ties) * single).to(tl.float64)
    if mass.to(tl.float64) >= goal:
        target = tl.math.ceil(goal).to(tl.int64)
        cut = find_threshold(logits, WIDTH, peak, sharpness, cut, peak, target, False, BLOCK)
        _, mass, allowed = tally(logits, WIDTH, peak, sharpness, cut, BLOCK)
        single = mass_of(cut, peak, sharpness)
    needed = tl.math.ceil((goal - mass.to(tl.float64)) / tl.maximum(single, 1).to(tl.float64))
    needed = tl.minimum(needed, allowed.to(tl.float64)).to(tl.int64)
    return cut, tl.maximum(needed, 1)


@triton.jit
def sample_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, noises, ids, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: rows."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    temperature = tl.load(temperatures + row).to(tl.float32)
    if temperature <= 0.0:
        tl.store(ids + row, argmax_of_row(logits, WIDTH, BLOCK).to(tl.int64))
    else:
        peak, cut = extent_of(logits, WIDTH, BLOCK)
        sharpness = 1.4426950408889634 / temperature
        top_k = tl.load(top_ks + row).to(tl.int64)
        top_p = tl.load(top_ps + row).to(tl.float64)
        allowed = tl.full([], WIDTH, tl.int64)
        if (top_k > 0) & (top_k < WIDTH):
            cut = find_threshold(logits, WIDTH, peak, sharpness, cut, peak, top_k, True, BLOCK)
            above, _, ties = tally(logits, WIDTH, peak, sharpness, cut, BLOCK)
            allowed = tl.minimum(ties, top_k - above)
        if top_p < 1.0:
            cut, allowed = apply_top_p(logits, WIDTH, peak, sharpness, cut, allowed, top_p, BLOCK)
        last_tie = tl.full([], WIDTH, tl.int32)
        if allowed < WIDTH:
            last_tie = id_of_tie(logits, WIDTH, cut, allowed - 1, BLOCK)
        least_mass = (tl.load(min_ps + row).to(tl.float64) * _UNIT).to(tl.int64)
        noise = tl.load(noises + row).to(tl.float64)
        token = draw_token(logits, WIDTH, peak, sharpness, cut, last_tie, least_mass, noise, BLOCK)
        tl.store(ids + row, token.to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    noise: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """One token per row of `logits [R, V]`, int64 `[R]`.

    All parameters are `[R]`: `temperature` (0: the most likely token, the first of equal ones), `top_k` (0: off),
    `top_p` (1: off) over what top-k left, `min_p` (0: off) relative to the most likely token, `noise` in (0, 1), the
    point of the cumulative distribution, in order of token ids, at which the draw is made. Among tokens of equal
    logits, the first ids are kept. Probabilities below 2**-44 of the largest are not drawn.
    """
    require_floats(logits=logits)
    require_rows("logits", logits)
    num_rows, width = logits.shape
    require(1 <= width <= MAX_VOCABULARY, f"a vocabulary of {width}; 1 to {MAX_VOCABULARY} are supported")
    require(not top_k.dtype.is_floating_point, f"top_k is {top_k.dtype}, must be an integer dtype")
    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "noise": noise}
    for name, parameter in parameters.items():
        require_vector(name, parameter, num_rows)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    require_vector("out", out, num_rows)
    require(out.dtype == torch.int64, f"out is {out.dtype}, must be int64")
    require_device(logits, out, *parameters.values())
    if num_rows:
        block = min(triton.next_power_of_2(width), 2048)
        sample_kernel[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            noise,
            out,
            logits.stride(0),
            WIDTH=width,
            BLOCK=block,
            num_warps=max(1, block // 128),
        )
    return out
