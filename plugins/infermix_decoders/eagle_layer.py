"""The draft layer of EAGLE (Li et al., 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty").

It guesses the next hidden state ("feature") from the one before and the token that came of it: a linear map of both
side by side, then one decoder layer of the Llama kind without a norm in front. The target's own head turns a guessed
feature into tokens. Tensors are named as in published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: `attend(q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, H, D]`: what is cached is up to whoever calls.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Cosines and sines `[..., 1, head_dim]` of positions.
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class EagleShape:
    """Sizes of a draft layer; `bias` is that of the first linear map."""

    width: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float
    bias: bool


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class DraftAttention(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.width, queries, bias=False)
        self.k_proj = nn.Linear(shape.width, keys, bias=False)
        self.v_proj = nn.Linear(shape.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        dim, (cos, sin) = self.shape.head_dim, angles
        q, k, v = (linear(x).unflatten(-1, (-1, dim)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(_rotated(q, cos, sin), _rotated(k, cos, sin), v).flatten(-2))


class DraftMlp(nn.Module):
    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape)
        self.mlp = DraftMlp(shape.width, shape.intermediate)
        self.post_attention_layernorm = RmsNorm(shape.width, shape.eps)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x = x + self.self_attn(x, angles, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleDraft(nn.Module):
    """`features`, `embeddings` `[..., D]`, `positions [...]` -> the next features `[..., D]`.

    Tokens of one position may share it: dimensions of `positions` may be 1.
    """

    _table: Tensor | None

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.width, shape.width, bias=shape.bias)
        self.layers = nn.ModuleList([DraftLayer(shape)])
        self.register_buffer("_table", None, persistent=False)

    def tabulate(self, num_positions: int) -> None:
        """From here on, look up the angles of the first positions: to compute them is ten launches."""
        positions = torch.arange(num_positions, device=self.fc.weight.device)
        self._table = torch.cat(self._angles(positions, self.fc.weight.dtype), dim=1)

    def forward(self, features: Tensor, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        both = self.fc(torch.cat((embeddings.to(features.dtype), features), dim=-1))
        return self.layers[0](both, self._angles(positions, both.dtype), attend)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        if self._table is None:
            return _angles(positions, self.shape.head_dim, self.shape.rope_theta, dtype)
        cos, sin = self._table[positions].split(1, dim=-2)
        return cos, sin


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Whole texts `[B, T, H, D]`, nothing cached."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def _angles(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> Angles:
    """`[..., 1, dim]` cosines and sines (Su et al., 2021), halves side by side."""
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    angles = positions[..., None].float() * theta**-steps
    angles = torch.cat((angles, angles), dim=-1)[..., None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin
