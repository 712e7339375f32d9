"""One row of x times 4-bit weights: nibbles become fp32 numbers without a conversion."""

from __future__ import annotations

import triton
import triton.language as tl

from infermix_kernels.dependent import wait_for_inputs


@triton.jit
def nibble(words, PLANE: tl.constexpr, ASM: tl.constexpr):
    """`128 + q` in fp32: the nibble in the mantissa of 128. The caller takes 128 off once per group."""
    shifted = words << (16 - 4 * PLANE) if PLANE < 4 else words >> (4 * PLANE - 16)
    if ASM:  # the compiler makes two instructions of an `and` and an `or` with constants
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 m, c; mov.b32 m, 0x000f0000; mov.b32 c, 0x43000000; lop3.b32 $0, $1, m, c, 0xea; }",
            "=r,r", [shifted], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        bits = (shifted & 0x000F0000) | 0x43000000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_words(w_at, step, valid, runs, num_runs, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(w_at + step * 32, eviction_policy="evict_first")
    else:
        mask = valid[:, None, None] & (step + runs < num_runs)[None, :, None]
        return tl.load(w_at + step * 32, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def multiply_runs(
    acc, words, x, scales, zeros, step, features, valid, N, K, num_groups,
    HAS_ZEROS: tl.constexpr, GROUP_SIZE: tl.constexpr, RUNS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`acc [BLOCK_N, RUNS, 32] += x w` over RUNS runs of 256 columns."""
    PER_RUN: tl.constexpr = 256 // GROUP_SIZE if GROUP_SIZE < 256 else 1
    PLANES: tl.constexpr = 8 // PER_RUN
    runs = step + tl.arange(0, RUNS)
    for part in tl.static_range(PER_RUN):
        group = (runs * 256 + part * (256 // PER_RUN)) // GROUP_SIZE
        mask = valid[:, None] & (group < num_groups)[None, :]
        at = group[None, :] * N + features[:, None]
        scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            zero = 128.0 + tl.load(zeros + at, mask=mask, other=0).to(tl.float32)
        else:
            zero = tl.full(scale.shape, 136.0, tl.float32)
        products = tl.zeros_like(acc)
        total = tl.zeros([RUNS, 32], tl.float32)
        for within in tl.static_range(PLANES):
            ks = runs[:, None] * 256 + (part * PLANES + within) * 32 + tl.arange(0, 32)[None, :]
            xs = tl.load(x + ks, mask=ks < K, other=0.0).to(tl.float32)
            total += xs
            products += nibble(words, part * PLANES + within, ASM) * xs[None, :, :]
        acc += (products - zero[:, :, None] * total[None, :, :]) * scale[:, :, None]
    return acc


@triton.jit
def w4_gemv_kernel(
    x,
    words,
    scales,
    zeros,
    out,
    bias,
    N,
    K,
    num_runs,
    num_groups,
    stride_w,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: tiles of BLOCK_N output features. The first words are read before the kernel waits for x."""
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = features < N
    runs = tl.arange(0, RUNS)
    lanes = tl.arange(0, 32)
    w_at = words + features.to(tl.int64)[:, None, None] * stride_w + (runs[:, None] * 32 + lanes[None, :])[None, :, :]
    packed = load_words(w_at, 0, valid, runs, num_runs, EVEN)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_N, RUNS, 32], tl.float32)
    acc = multiply_runs(
        acc, packed, x, scales, zeros, 0, features, valid, N, K, num_groups, HAS_ZEROS, GROUP_SIZE, RUNS, ASM
    )
    for step in range(RUNS, num_runs, RUNS):
        packed = load_words(w_at, step, valid, runs, num_runs, EVEN)
        acc = multiply_runs(
            acc, packed, x, scales, zeros, step, features, valid, N, K, num_groups, HAS_ZEROS, GROUP_SIZE, RUNS, ASM
        )
    result = tl.sum(tl.sum(acc, axis=2), axis=1)
    if HAS_BIAS:
        result += tl.load(bias + features, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + features, result.to(out.dtype.element_ty), mask=valid)
