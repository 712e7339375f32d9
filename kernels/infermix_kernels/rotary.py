"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import (
    output_like,
    require,
    require_device,
    require_floats,
    require_rows,
    require_shape,
    require_vector,
)
from infermix_kernels.dependent import wait_for_inputs


@dataclass(frozen=True)
class RotaryTable:
    """`cos` and `sin` `[max_position, R / 2]`: the first `R` dimensions of a head are rotated, the others kept.

    Pairs are (i, i + R / 2), or (2 i, 2 i + 1) when `interleaved`. Positions must lie inside the table: they are not
    checked. Any scaling of the embedding belongs into the table.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @property
    def half(self) -> int:
        return int(self.cos.shape[1])

    def check(self, head_dim: int, positions: Tensor, num_tokens: int) -> None:
        """Raises `ValueError` when table, positions and heads do not fit together."""
        require_floats(cos=self.cos, sin=self.sin)
        require_shape("sin", self.sin, tuple(self.cos.shape))
        require(self.cos.is_contiguous() and self.sin.is_contiguous(), "cos and sin must be contiguous")
        require(2 * self.half <= head_dim, f"{2 * self.half} rotated dimensions in heads of {head_dim}")
        require(positions.dtype in (torch.int32, torch.int64), f"positions are {positions.dtype}")
        require_vector("positions", positions, num_tokens)
        require_device(self.cos, self.sin, positions)


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm over every query and key head before it is rotated: weights `[Dk]`, used as `weight + offset`."""

    q: Tensor
    k: Tensor
    eps: float
    offset: float = 0.0

    def check(self, head_dim: int) -> None:
        require_floats(q_norm=self.q, k_norm=self.k)
        require_vector("q_norm", self.q, head_dim)
        require_vector("k_norm", self.k, head_dim)


@triton.jit
def pair_offsets(index, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        return 2 * index, 2 * index + 1
    else:
        return index, index + HALF


@triton.jit
def load_pairs(source, offsets, valid, HALF: tl.constexpr, PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The pairs of some heads, two fp32 tiles `[HEADS, PAD]`; `offsets` are where each head starts."""
    index = tl.arange(0, PAD)
    first, second = pair_offsets(index, HALF, INTERLEAVED)
    mask = valid[:, None] & (index < HALF)[None, :]
    a = tl.load(source + offsets[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + offsets[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def turn(a, b, angles_cos, angles_sin, position, HALF: tl.constexpr, PAD: tl.constexpr):
    index = tl.arange(0, PAD)
    row = position.to(tl.int64) * HALF
    c = tl.load(angles_cos + row + index, mask=index < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(angles_sin + row + index, mask=index < HALF, other=0.0).to(tl.float32)[None, :]
    return a * c - b * s, b * c + a * s


@triton.jit
def normed(values, factor, weight, at, inside, shift, source):
    """`values * factor * (weight + shift)`, rounded as the tensor that a norm of its own would have written."""
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + shift
    return (values * factor[:, None] * scale[None, :]).to(source.dtype.element_ty).to(tl.float32)


@triton.jit
def load_head(
    source, offsets, valid, angles_cos, angles_sin, position, weight, eps, shift,
    DIM: tl.constexpr, HALF: tl.constexpr, PAD_HALF: tl.constexpr, PAD_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotated pairs and the unrotated rest of some heads; with NORM, RMSNorm over each head comes before."""
    a, b = load_pairs(source, offsets, valid, HALF, PAD_HALF, INTERLEAVED)
    rest = a
    if PAD_TAIL > 0:
        rest = load_tail(source, offsets, valid, 2 * HALF, DIM - 2 * HALF, PAD_TAIL)
    if NORM:
        total = tl.sum(a * a + b * b, axis=1)
        if PAD_TAIL > 0:
            total += tl.sum(rest * rest, axis=1)
        factor = 1.0 / tl.sqrt(total / DIM + eps)
        index = tl.arange(0, PAD_HALF)
        first, second = pair_offsets(index, HALF, INTERLEAVED)
        a = normed(a, factor, weight, first, index < HALF, shift, source)
        b = normed(b, factor, weight, second, index < HALF, shift, source)
        if PAD_TAIL > 0:
            behind = tl.arange(0, PAD_TAIL)
            rest = normed(rest, factor, weight, 2 * HALF + behind, behind < DIM - 2 * HALF, shift, source)
    a, b = turn(a, b, angles_cos, angles_sin, position, HALF, PAD_HALF)
    return a, b, rest


@triton.jit
def store_pairs(target, offsets, valid, a, b, HALF: tl.constexpr, PAD: tl.constexpr, INTERLEAVED):
    index = tl.arange(0, PAD)
    first, second = pair_offsets(index, HALF, INTERLEAVED)
    mask = valid[:, None] & (index < HALF)[None, :]
    tl.store(target + offsets[:, None] + first[None, :], a.to(target.dtype.element_ty), mask=mask)
    tl.store(target + offsets[:, None] + second[None, :], b.to(target.dtype.element_ty), mask=mask)


@triton.jit
def load_tail(source, offsets, valid, START: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Dimensions `START ... START + WIDTH` of some heads, fp32 `[HEADS, PAD]`."""
    index = tl.arange(0, PAD)
    mask = valid[:, None] & (index < WIDTH)[None, :]
    return tl.load(source + offsets[:, None] + START + index[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tail(target, offsets, valid, values, START: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr):
    index = tl.arange(0, PAD)
    mask = valid[:, None] & (index < WIDTH)[None, :]
    tl.store(target + offsets[:, None] + START + index[None, :], values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def rotate_heads(
    source,
    target,
    source_offsets,
    target_offsets,
    valid,
    angles_cos,
    angles_sin,
    position,
    weight,
    eps,
    shift,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAD_HALF: tl.constexpr,
    PAD_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Read whole, then written: `target` may be `source`."""
    if HALF > 0:
        a, b, rest = load_head(
            source, source_offsets, valid, angles_cos, angles_sin, position, weight, eps, shift,
            DIM, HALF, PAD_HALF, PAD_TAIL, INTERLEAVED, NORM,
        )  # fmt: skip
        store_pairs(target, target_offsets, valid, a, b, HALF, PAD_HALF, INTERLEAVED)
        if PAD_TAIL > 0:
            store_tail(target, target_offsets, valid, rest, 2 * HALF, DIM - 2 * HALF, PAD_TAIL)
    elif PAD_TAIL > 0:
        rest = load_tail(source, source_offsets, valid, 0, DIM, PAD_TAIL)
        store_tail(target, target_offsets, valid, rest, 0, DIM, PAD_TAIL)


@triton.jit
def rotary_kernel(
    q,
    k,
    q_out,
    k_out,
    angles_cos,
    angles_sin,
    positions,
    num_q_heads,
    num_k_heads,
    q_token,
    q_head,
    k_token,
    k_head,
    qo_token,
    qo_head,
    ko_token,
    ko_head,
    q_tiles,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAD_HALF: tl.constexpr,
    PAD_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tokens, tiles of query heads, then of key heads)."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    wait_for_inputs(PDL)
    position = tl.load(positions + token)
    if tile < q_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        source_offsets, target_offsets = token * q_token + heads * q_head, token * qo_token + heads * qo_head
        rotate_heads(
            q, q_out, source_offsets, target_offsets, heads < num_q_heads, angles_cos, angles_sin, position,
            angles_cos, 0.0, 0.0, DIM, HALF, PAD_HALF, PAD_TAIL, INTERLEAVED, False,
        )  # fmt: skip
    else:
        heads = (tile - q_tiles) * HEADS + tl.arange(0, HEADS)
        source_offsets, target_offsets = token * k_token + heads * k_head, token * ko_token + heads * ko_head
        rotate_heads(
            k, k_out, source_offsets, target_offsets, heads < num_k_heads, angles_cos, angles_sin, position,
            angles_cos, 0.0, 0.0, DIM, HALF, PAD_HALF, PAD_TAIL, INTERLEAVED, False,
        )  # fmt: skip


def rotary(
    q: Tensor,
    k: Tensor,
    table: RotaryTable,
    positions: Tensor,
    *,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """`q [T, H, D]`, `k [T, Hkv, D]` rotated to `positions [T]`, computed in fp32. In place: `q_out=q, k_out=k`."""
    require_floats(q=q, k=k)
    require_rows("q", q, (3,))
    require_rows("k", k, (3,))
    require_shape("k", k, (q.shape[0], k.shape[1], q.shape[2]))
    table.check(q.shape[2], positions, q.shape[0])
    require_device(q, k, table.cos)
    q_out = output_like("q_out", q_out, tuple(q.shape), q)
    k_out = output_like("k_out", k_out, tuple(k.shape), k)
    num_tokens, num_heads, dim = q.shape
    if num_tokens == 0:
        return q_out, k_out
    heads, warps = head_launch(num_tokens, max(num_heads, k.shape[1]))
    q_tiles = triton.cdiv(num_heads, heads)
    rotary_kernel[(num_tokens, q_tiles + triton.cdiv(k.shape[1], heads))](
        q,
        k,
        q_out,
        k_out,
        table.cos,
        table.sin,
        positions,
        num_heads,
        k.shape[1],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        q_out.stride(0),
        q_out.stride(1),
        k_out.stride(0),
        k_out.stride(1),
        q_tiles,
        DIM=dim,
        HALF=table.half,
        PAD_HALF=triton.next_power_of_2(table.half),
        PAD_TAIL=padded_tail(dim, table.half),
        INTERLEAVED=table.interleaved,
        HEADS=heads,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return q_out, k_out


def head_launch(num_tokens: int, num_heads: int) -> tuple[int, int]:
    """Heads and warps a program: many heads when there are many tokens, few when one token has to fill the device."""
    heads = min(triton.next_power_of_2(num_heads), 4 if num_tokens < 64 else 16)
    return heads, 4 if heads >= 8 else 2


def padded_tail(dim: int, half: int) -> int:
    """The unrotated dimensions, as a power of two; 0 when there are none."""
    rest = dim - 2 * half
    return triton.next_power_of_2(rest) if rest else 0
