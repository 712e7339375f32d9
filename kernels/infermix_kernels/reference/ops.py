"""What the small operators mean, in plain PyTorch: computed in fp32 (fp64 for fp64 input), rounded once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in fp32, or as it is if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    values = wide(x)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normed * (wide(weight) + weight_offset)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    residual = x + residual
    return rms_norm(residual, weight, eps, weight_offset=weight_offset), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    shift = None if bias is None else wide(bias)
    return F.layer_norm(wide(x), x.shape[-1:], wide(weight), shift, eps).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    residual = x + residual
    return layer_norm(residual, weight, bias, eps), residual


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(wide(gate)) * wide(up)).to(gate.dtype)


def gelu_mul(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
    return (F.gelu(wide(gate), approximate=approximate) * wide(up)).to(gate.dtype)


def silu_and_mul(packed: Tensor) -> Tensor:
    return silu_mul(*packed.chunk(2, dim=-1))


def gelu_and_mul(packed: Tensor, *, approximate: str = "tanh") -> Tensor:
    return gelu_mul(*packed.chunk(2, dim=-1), approximate=approximate)


def softmax(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return torch.softmax(wide(x) * scale, dim=-1).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> Tensor:
    """`x [T, H, D]`, `cos` and `sin [max_position, R / 2]`, `positions [T]`."""
    half = cos.shape[1]
    c, s = wide(cos)[positions.long()][:, None], wide(sin)[positions.long()][:, None]
    values, rest = wide(x)[..., : 2 * half], x[..., 2 * half :]
    a, b = (values[..., 0::2], values[..., 1::2]) if interleaved else (values[..., :half], values[..., half:])
    pair = (a * c - b * s, b * c + a * s)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def write_kv(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """`k [T, Hkv, Dk]`, `v [T, Hkv, Dv]` to slots of `[num_blocks + 1, block_size, Hkv, D]`, in place.

    With scales `[num_blocks + 1, Hkv, block_size]` as `quantize_rows` has them, one for each token and head.
    """
    blocks, offsets = slot_mapping // keys.shape[1], slot_mapping % keys.shape[1]
    for new, pool, scales in ((k, keys, key_scales), (v, values, value_scales)):
        if scales is None:
            pool[blocks, offsets] = new.to(pool.dtype)
            continue
        numbers, factors = quantize_rows(new, pool.dtype)
        # fp8 has no scatter of its own on every device: bytes have.
        pool.view(torch.uint8)[blocks, offsets] = numbers.view(torch.uint8)
        scales[blocks, :, offsets] = factors.to(scales.dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x [..., D]` -> (numbers of int8 or float8_e4m3fn, scales `[...]`): the largest magnitude fills the dtype."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    amax = wide(x).abs().amax(-1)
    inverse = torch.where(amax > 0, largest / amax, torch.zeros_like(amax))
    scaled = (wide(x) * inverse[..., None]).clamp(-largest, largest)
    return (torch.round(scaled) if dtype == torch.int8 else scaled).to(dtype), amax / largest
