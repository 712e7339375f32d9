"""One row times 8-bit weights, quantized by every program for itself: one launch less than quantizing it before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import interpreted, require, require_device, require_rows, require_shape, require_vector
from infermix_kernels.dependent import wait_for_inputs
from infermix_kernels.matmul_launch import RowLaunch, check_matrix

#: A good start for FP8 weights, whose products are summed in fp32: a register for each element of a step.
FP8_ROW = RowLaunch(4, 256, 4)
#: Adding and subtracting 1.5 * 2**23 rounds an fp32 number to the nearest integer, ties to even; before the
#: subtraction, the lowest byte of the number's bits is that integer.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def dot_bytes(a, b, acc, ASM: tl.constexpr):
    """`acc` plus the inner products of four signed bytes each, packed in int32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for shift in tl.static_range(0, 32, 8):
            acc += ((a << (24 - shift)) >> 24) * ((b << (24 - shift)) >> 24)
        return acc


@triton.jit
def inverse_of_row(x, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """(LARGEST / the largest magnitude of a row, or 0; that magnitude / LARGEST)."""
    cols = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        values = tl.load(x + start + cols, mask=start + cols < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
    amax = tl.max(largest, axis=0)
    return tl.where(amax > 0.0, LARGEST / tl.where(amax > 0.0, amax, 1.0), 0.0), amax * (1.0 / LARGEST)


@triton.jit
def int8_byte(four, inverse, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """Number PLACE of four 16-bit ones in an int64, rounded to an int8 at byte PLACE of an int32."""
    number = (four >> (16 * PLACE)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return ((number * inverse + _ROUNDER).to(tl.int32, bitcast=True) & 0xFF) << (8 * PLACE)


@triton.jit
def int8_words(at, inside, inverse, DTYPE: tl.constexpr):
    """Four columns of x at each int64 address, as the bytes of an int32."""
    four = tl.load(at, mask=inside, other=0)
    low = int8_byte(four, inverse, 0, DTYPE) | int8_byte(four, inverse, 1, DTYPE)
    return low | int8_byte(four, inverse, 2, DTYPE) | int8_byte(four, inverse, 3, DTYPE)


@triton.jit
def store_row(result, out, w_scale, bias, features, N, HAS_BIAS: tl.constexpr):
    result = result * tl.load(w_scale + features, mask=features < N, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + features, mask=features < N, other=0.0).to(tl.float32)
    tl.store(out + features, result.to(out.dtype.element_ty), mask=features < N)


@triton.jit
def int8_row_kernel(
    x, fours, w, out, w_scale, bias, N, num_words, stride_w,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`fours` is x read as int64, `w` as int32: four columns each. The first weights are read before x is there."""
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    w_at = w + features.to(tl.int64)[:, None] * stride_w + ks[None, :]
    if EVEN:
        weights = tl.load(w_at, eviction_policy="evict_first")
    else:
        weights = tl.load(w_at, mask=(features < N)[:, None] & (ks < num_words)[None, :], other=0)
    wait_for_inputs(PDL)
    inverse, scale = inverse_of_row(x, num_words * 4, 127.0, 4 * BLOCK_K)
    xs = int8_words(fours + ks, ks < num_words, inverse, x.dtype.element_ty)
    acc = dot_bytes(weights, tl.broadcast_to(xs[None, :], [BLOCK_N, BLOCK_K]), tl.zeros_like(weights), ASM)
    for start in range(BLOCK_K, num_words, BLOCK_K):
        inside = start + ks < num_words
        if EVEN:
            weights = tl.load(w_at + start, eviction_policy="evict_first")
        else:
            weights = tl.load(w_at + start, mask=(features < N)[:, None] & inside[None, :], other=0)
        xs = int8_words(fours + start + ks, inside, inverse, x.dtype.element_ty)
        acc = dot_bytes(weights, tl.broadcast_to(xs[None, :], [BLOCK_N, BLOCK_K]), acc, ASM)
    store_row(tl.sum(acc, axis=1).to(tl.float32) * scale, out, w_scale, bias, features, N, HAS_BIAS)


@triton.jit
def fp8_row_kernel(
    x, w, out, w_scale, bias, N, K, stride_w,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `int8_row_kernel`; products of FP8 numbers are exact in fp32."""
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    w_at = w + features.to(tl.int64)[:, None] * stride_w + ks[None, :]
    if EVEN:
        weights = tl.load(w_at, eviction_policy="evict_first")
    else:
        weights = tl.load(w_at, mask=(features < N)[:, None] & (ks < K)[None, :], other=0.0)
    wait_for_inputs(PDL)
    inverse, scale = inverse_of_row(x, K, 448.0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + ks < K
        if start > 0:
            if EVEN:
                weights = tl.load(w_at + start, eviction_policy="evict_first")
            else:
                weights = tl.load(w_at + start, mask=(features < N)[:, None] & inside[None, :], other=0.0)
        xs = tl.load(x + start + ks, mask=inside, other=0.0).to(tl.float32) * inverse
        xs = tl.clamp(xs, -448.0, 448.0).to(w.dtype.element_ty).to(tl.float32)
        acc += weights.to(tl.float32) * xs[None, :]
    store_row(tl.sum(acc, axis=1) * scale, out, w_scale, bias, features, N, HAS_BIAS)


def takes_row(x: Tensor, weight: Tensor) -> bool:
    """One row of 16-bit numbers, four columns a word."""
    aligned = x.data_ptr() % 8 == 0 and weight.data_ptr() % 4 == 0 and (weight.shape[1] | weight.stride(0)) % 4 == 0
    return x.shape[0] == 1 and x.element_size() == 2 and aligned


def row_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    launch: RowLaunch,
    *,
    pdl: bool = False,
) -> None:
    """`out [1, N] = x [1, K] (weight [N, K] * weight_scale [N])^T + bias`, x rounded to the weight's int8 or FP8."""
    num_columns, width = weight.shape
    check_matrix(x, num_columns, width)
    require(takes_row(x, weight), "a RowLaunch takes one row of 16-bit numbers, columns and addresses in fours")
    require_rows("weight", weight)
    require_shape("out", out, (1, num_columns))
    require_rows("out", out)
    require_vector("weight_scale", weight_scale, num_columns)
    require_vector("bias", bias, num_columns)
    require_device(x, weight, weight_scale, bias, out)
    grid = (triton.cdiv(num_columns, launch.block_n),)
    block = min(launch.block_words, triton.next_power_of_2(width // 4))
    tail = (out, weight_scale, weight_scale if bias is None else bias, num_columns)
    shared = {"HAS_BIAS": bias is not None, "BLOCK_N": launch.block_n, "PDL": pdl}
    shared |= {"num_warps": launch.num_warps, "launch_pdl": pdl}
    even = num_columns % launch.block_n == 0 and width % (4 * block) == 0
    if weight.dtype == torch.int8:
        words = weight.view(torch.int32)
        int8_row_kernel[grid](
            x, x.view(torch.int64), words, *tail, width // 4, words.stride(0),
            BLOCK_K=block, EVEN=even, ASM=not interpreted(), **shared,
        )  # fmt: skip
    else:
        fp8_row_kernel[grid](x, weight, *tail, width, weight.stride(0), BLOCK_K=4 * block, EVEN=even, **shared)
