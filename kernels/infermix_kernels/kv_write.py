"""Writing keys and values into their slots: rotation, scatter and optional quantization in one launch."""

from __future__ import annotations

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
from infermix_kernels.rotary import (
    HeadNorms,
    RotaryTable,
    head_launch,
    load_head,
    load_tail,
    padded_tail,
    rotate_heads,
    store_pairs,
    store_tail,
)

#: Largest magnitude of each quantized dtype; 0 means that values are stored as they are.
QUANT_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: Adding and subtracting 1.5 * 2**23 rounds an fp32 number to the nearest integer, ties to even.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def to_storage(values, inverse, target, QUANT_MAX: tl.constexpr):
    """`values * inverse` in the dtype of the pool: rounded to an integer for int8, by the conversion for fp8."""
    if QUANT_MAX == 0:
        return values
    elif QUANT_MAX == 127.0:
        return (values * inverse[:, None] + _ROUNDER) - _ROUNDER
    else:
        return values * inverse[:, None]


@triton.jit
def absolute_max(values):
    return tl.max(tl.abs(values), axis=1)


@triton.jit
def inverse_scale(amax, scales, offsets, valid, QUANT_MAX: tl.constexpr):
    """Stores the scale `amax / QUANT_MAX` and returns its inverse, 0 for a row of zeros."""
    if QUANT_MAX == 0:
        return amax
    else:
        tl.store(scales + offsets, (amax * (1.0 / QUANT_MAX)).to(scales.dtype.element_ty), mask=valid)
        return tl.where(amax > 0.0, QUANT_MAX / tl.where(amax > 0.0, amax, 1.0), 0.0)


@triton.jit
def write_keys(
    k, pool, scales, k_offsets, pool_offsets, scale_offsets, valid, angles_cos, angles_sin, position,
    weight, eps, shift,
    DIM: tl.constexpr, HALF: tl.constexpr, PAD_HALF: tl.constexpr, PAD_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr, QUANT_MAX: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A rotated key (HALF = 0: an unrotated one) of some heads into one slot."""
    amax = tl.zeros([HEADS], tl.float32)
    if HALF > 0:
        a, b, rest = load_head(
            k, k_offsets, valid, angles_cos, angles_sin, position, weight, eps, shift,
            DIM, HALF, PAD_HALF, PAD_TAIL, INTERLEAVED, NORM,
        )  # fmt: skip
        amax = tl.maximum(absolute_max(a), absolute_max(b))
    elif PAD_TAIL > 0:
        rest = load_tail(k, k_offsets, valid, 0, DIM, PAD_TAIL)
    if PAD_TAIL > 0:
        amax = tl.maximum(amax, absolute_max(rest))
    inverse = inverse_scale(amax, scales, scale_offsets, valid, QUANT_MAX)
    if HALF > 0:
        a, b = to_storage(a, inverse, pool, QUANT_MAX), to_storage(b, inverse, pool, QUANT_MAX)
        store_pairs(pool, pool_offsets, valid, a, b, HALF, PAD_HALF, INTERLEAVED)
    if PAD_TAIL > 0:
        rest = to_storage(rest, inverse, pool, QUANT_MAX)
        store_tail(pool, pool_offsets, valid, rest, 2 * HALF, DIM - 2 * HALF, PAD_TAIL)


@triton.jit
def kv_write_kernel(
    q,
    k,
    v,
    q_out,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    angles_cos,
    angles_sin,
    positions,
    q_weight,
    k_weight,
    eps,
    shift,
    num_q_heads,
    num_kv_heads,
    block_size,
    q_token,
    q_head,
    qo_token,
    qo_head,
    k_token,
    k_head,
    v_token,
    v_head,
    keys_block,
    keys_token,
    keys_head,
    values_block,
    values_token,
    values_head,
    scales_block,
    scales_head,
    scales_token,
    q_tiles,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAD_HALF: tl.constexpr,
    PAD_TAIL: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUANT_MAX: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tokens, tiles of query heads to rotate, then of KV heads to rotate and store)."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    wait_for_inputs(PDL)
    position = token
    if HALF > 0:
        position = tl.load(positions + token).to(tl.int64)
    if tile < q_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        rotate_heads(
            q, q_out, token * q_token + heads * q_head, token * qo_token + heads * qo_head, heads < num_q_heads,
            angles_cos, angles_sin, position, q_weight, eps, shift,
            KEY_DIM, HALF, PAD_HALF, PAD_TAIL, INTERLEAVED, NORM,
        )  # fmt: skip
    else:
        heads = (tile - q_tiles) * HEADS + tl.arange(0, HEADS)
        slot = tl.load(slots + token)
        valid = (heads < num_kv_heads) & (slot >= 0)
        block, offset = slot // block_size, slot % block_size
        scale_offsets = block * scales_block + offset * scales_token + heads * scales_head
        write_keys(
            k, keys, key_scales, token * k_token + heads * k_head,
            block * keys_block + offset * keys_token + heads * keys_head, scale_offsets, valid,
            angles_cos, angles_sin, position, k_weight, eps, shift,
            KEY_DIM, HALF, PAD_HALF, PAD_TAIL, INTERLEAVED, QUANT_MAX, HEADS, NORM,
        )  # fmt: skip
        write_keys(
            v, values, value_scales, token * v_token + heads * v_head,
            block * values_block + offset * values_token + heads * values_head, scale_offsets, valid,
            angles_cos, angles_sin, position, k_weight, eps, shift,
            VALUE_DIM, 0, 1, PAD_VALUE, False, QUANT_MAX, HEADS, False,
        )  # fmt: skip


def write_kv(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    table: RotaryTable | None = None,
    positions: Tensor | None = None,
    q: Tensor | None = None,
    q_out: Tensor | None = None,
    norms: HeadNorms | None = None,
    pdl: bool = False,
) -> Tensor | None:
    """Store `k [T, Hkv, Dk]`, `v [T, Hkv, Dv]` at slots `slot_mapping [T]` int64 of `keys`, `values`
    `[num_blocks + 1, block_size, Hkv, D]`, and return the rotated queries (or `None` when no `q` is given).

    With a `table`, keys and `q [T, H, Dk]` are rotated to `positions [T]` on the way, after `norms` where they are
    given; `q_out` may be `q`. Pools of
    int8 or float8_e4m3fn need `key_scales` and `value_scales` `[num_blocks + 1, Hkv, block_size]`: a stored number
    times its scale (largest magnitude of the head / 127 or 448) is the value. Slots beyond the pool are not checked;
    negative ones are skipped.
    """
    quant_max = _check_pools(k, v, keys, values, slot_mapping, key_scales, value_scales)
    _check_rotation(k, q, table, positions)
    if norms is not None:
        require(table is not None, "norms are given, but no table to rotate what they normed")
        norms.check(k.shape[2])
        require_device(k, norms.q, norms.k)
    if q is not None:
        q_out = output_like("q_out", q_out, tuple(q.shape), q)
    num_tokens, num_kv_heads, dim = k.shape
    if num_tokens == 0:
        return q_out
    half = 0 if table is None else table.half
    queries, rotated = (k if q is None else q), (k if q_out is None else q_out)
    num_q_heads = 0 if q is None else q.shape[1]
    heads, warps = head_launch(num_tokens, max(num_q_heads, num_kv_heads))
    q_tiles = triton.cdiv(num_q_heads, heads)
    scales = (keys, values) if key_scales is None else (key_scales, value_scales)
    kv_write_kernel[(num_tokens, q_tiles + triton.cdiv(num_kv_heads, heads))](
        queries,
        k,
        v,
        rotated,
        keys,
        values,
        *scales,
        slot_mapping,
        keys if table is None else table.cos,
        keys if table is None else table.sin,
        slot_mapping if positions is None else positions,
        keys if norms is None else norms.q,
        keys if norms is None else norms.k,
        0.0 if norms is None else norms.eps,
        0.0 if norms is None else norms.offset,
        num_q_heads,
        num_kv_heads,
        keys.shape[1],
        *queries.stride()[:2],
        *rotated.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *((0, 0, 0) if key_scales is None else key_scales.stride()),
        q_tiles,
        KEY_DIM=dim,
        VALUE_DIM=v.shape[2],
        HALF=half,
        PAD_HALF=triton.next_power_of_2(max(half, 1)),
        PAD_TAIL=padded_tail(dim, half),
        PAD_VALUE=triton.next_power_of_2(v.shape[2]),
        INTERLEAVED=table is not None and table.interleaved,
        QUANT_MAX=quant_max,
        HEADS=heads,
        NORM=norms is not None,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return q_out


def _check_pools(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> float:
    """The largest magnitude of the pools' dtype, 0 when they are not quantized."""
    require_floats(k=k, v=v)
    require_rows("k", k, (3,))
    require_rows("v", v, (3,))
    require_shape("v", v, (k.shape[0], k.shape[1], v.shape[2]))
    for name, pool, new in (("keys", keys, k), ("values", values, v)):
        require_rows(name, pool, (4,))
        require_shape(name, pool, (keys.shape[0], keys.shape[1], k.shape[1], new.shape[2]))
    require(slot_mapping.dtype == torch.int64, f"slot_mapping is {slot_mapping.dtype}, must be int64")
    require_vector("slot_mapping", slot_mapping, k.shape[0])
    require(keys.dtype == values.dtype, f"keys are {keys.dtype}, values {values.dtype}")
    require_device(k, v, keys, values, slot_mapping, key_scales, value_scales)
    if keys.dtype not in QUANT_MAX:
        require_floats(keys=keys)
        require(key_scales is None and value_scales is None, f"scales are given for keys of {keys.dtype}")
        return 0.0
    if key_scales is None or value_scales is None:
        raise ValueError(f"pools of {keys.dtype} need key_scales and value_scales")
    num_blocks, block_size, num_kv_heads = keys.shape[:3]
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        require_shape(name, scales, (num_blocks, num_kv_heads, block_size))
        require_floats(**{name: scales})
    require(key_scales.stride() == value_scales.stride(), "key_scales and value_scales have different strides")
    return QUANT_MAX[keys.dtype]


def _check_rotation(k: Tensor, q: Tensor | None, table: RotaryTable | None, positions: Tensor | None) -> None:
    require((table is None) == (positions is None), "a table and positions are given together, or neither")
    require(q is None or table is not None, "queries are given, but no table to rotate them")
    if table is not None and positions is not None:
        table.check(k.shape[2], positions, k.shape[0])
        require_device(k, table.cos)
    if q is not None:
        require_floats(k=k, q=q)
        require_rows("q", q, (3,))
        require_shape("q", q, (k.shape[0], q.shape[1], k.shape[2]))
        require_device(k, q)
