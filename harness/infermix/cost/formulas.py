"""Closed forms of the cost of inference. Plain numbers in, plain numbers out; sizes in bytes, times in seconds."""

from __future__ import annotations

import math


def ridge(flops_per_s: float, bytes_per_s: float) -> float:
    """FLOP per byte above which a machine is bound by compute (Williams et al., 2009, the roofline model)."""
    return flops_per_s / bytes_per_s


def ridge_rows(flops_per_s: float, bytes_per_s: float, weight_bits: float) -> float:
    """Rows that a matmul needs to reach the ridge when its weights dominate: 2 FLOP per weight and row.

    The ridge belongs to a pair: FLOP/s of the dtype computed in, bytes of the dtype that weights are stored in.
    """
    return ridge(flops_per_s, bytes_per_s) * weight_bits / 16


def matmul_intensity(rows: float, inner: float, outer: float, element_bytes: float = 2) -> float:
    """FLOP per byte of `[rows, inner] x [inner, outer]` with every operand moved once: 1/I = 1/B + 1/D + 1/F."""
    return 2 / element_bytes / (1 / rows + 1 / inner + 1 / outer)


def matmul_rows_for(intensity: float, inner: float, outer: float, element_bytes: float = 2) -> float:
    """Rows at which `matmul_intensity` reaches `intensity`; infinite when no number of rows does."""
    rest = 2 / element_bytes / intensity - 1 / inner - 1 / outer
    return 1 / rest if rest > 0 else math.inf


def attention_intensity(context: float, queries: float, group_size: float = 1, element_bytes: float = 2) -> float:
    """FLOP per byte of attention: S T / (S + T) for MHA, times the queries that share a KV head."""
    return 2 / element_bytes * group_size * context * queries / (context + queries)


def kv_bytes(num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int, element_bytes: float = 2) -> float:
    """Keys and values of one sequence."""
    return 2 * num_layers * num_kv_heads * head_dim * num_tokens * element_bytes


def decode_step_s(weight_bytes: float, kv_bytes_per_seq: float, batch: int, bytes_per_s: float) -> float:
    """Time to read all weights once and the KV of every sequence once."""
    return (weight_bytes + batch * kv_bytes_per_seq) / bytes_per_s


def positions_forwarded(num_prompt: int, num_new: int, *, cached: bool) -> int:
    """Token positions that go through the model to produce `num_new` tokens."""
    if cached:
        return num_prompt + num_new - 1
    return num_new * num_prompt + num_new * (num_new - 1) // 2


def score_matrix_bytes(num_tokens: int, num_heads: int, element_bytes: float = 2) -> float:
    """The N x N scores of one layer, if they were written out."""
    return num_tokens**2 * num_heads * element_bytes


def lora_parameters(rank: int, in_features: int, out_features: int) -> int:
    return rank * (in_features + out_features)


def blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)


def shared_prefix_blocks(num_tokens: int, num_requests: int, block_size: int) -> tuple[int, int]:
    """Blocks of a common prefix, (shared by all requests, stored once per request). Only full blocks are shared."""
    full = num_tokens // block_size
    own = blocks(num_tokens, block_size) - full
    return full + own * num_requests, blocks(num_tokens, block_size) * num_requests


def waste(reserved_tokens: int, used_tokens: int) -> float:
    """Share of reserved slots that hold no token."""
    return 1 - used_tokens / reserved_tokens


def tokens_per_target_forward(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens emitted per target forward, bonus token included (Leviathan et al., 2023, equation 1)."""
    if acceptance == 1:
        return num_draft_tokens + 1
    return (1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance)


def speculative_speedup(num_accepted: float, num_draft_tokens: int, draft_cost: float) -> float:
    """Over plain decoding; `draft_cost` is one draft forward in target forwards."""
    return (num_accepted + 1) / (1 + num_draft_tokens * draft_cost)


def transfer_s(num_bytes: float, bytes_per_s: float) -> float:
    return num_bytes / bytes_per_s


def bits_per_weight(
    weight_bits: float, group_size: int, scale_bits: float, *, zero_bits: float = 0, scales_per_scale: int = 0
) -> float:
    """Effective bits of a group-wise quantization, scales and zero points included.

    With `scales_per_scale` the scales themselves are stored in `scale_bits` and share one fp32 constant per that
    many groups (double quantization, Dettmers et al., 2023, section 3).
    """
    second = 32 / (group_size * scales_per_scale) if scales_per_scale else 0.0
    return weight_bits + (scale_bits + zero_bits) / group_size + second


def weight_bytes(num_parameters: float, bits: float) -> float:
    return num_parameters * bits / 8
