"""Random inputs of attention in every shape, with everything that must not be read poisoned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from infermix_kernels.reference.attention import paged_attention as reference_attention
from torch import Tensor

#: Id of table entries that no context covers: reading through one would fault.
WILD_BLOCK = 1 << 29

#: Bound of |out - reference| / |reference| (2-norms), reference in fp64. fp32: a dozen roundings of 2^-24 and the
#: 2 ulp of the hardware's exp2 in sums of up to some thousand terms. fp16, bf16: weights and output are rounded once
#: each, to 2^-12 and 2^-9 relative at most, and errors of the weights average out.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 7e-4, torch.bfloat16: 6e-3}


@dataclass(frozen=True)
class Case:
    """`block_size` 0 is a dense view; `kv` names the dtype of quantized pools; `shared`: values are part of keys."""

    name: str
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv: torch.dtype | None = None
    scale_dtype: torch.dtype = torch.float32
    scales_strided: bool = False
    rules: dict[str, Any] = field(default_factory=dict)
    sinks: bool = False
    tree: bool = False
    shared: bool = False
    launch: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name


def build(case: Case, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Keyword arguments of `paged_attention`, `out` filled with NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, (heads, kv_heads) = sum(case.query_lens), case.heads
    q = _random((num_tokens, heads, case.dims[0]), generator).to(case.dtype)
    tables, shape, used = _layout(case, generator)
    keys, key_scales = _pool((*shape, kv_heads, case.dims[0]), used, case, generator)
    values, value_scales = _pool((*shape, kv_heads, case.dims[1]), used, case, generator)
    keys = keys.to(device)
    if case.shared:
        values = keys[..., : case.dims[1]]
    starts = torch.tensor((0, *case.query_lens)).cumsum(0).to(torch.int32)
    arguments = {
        "q": q,
        "keys": keys,
        "values": values,
        "cu_seqlens_q": starts,
        "context_lens": torch.tensor(case.contexts, dtype=torch.int32),
        "block_tables": tables,
        "key_scales": key_scales,
        "value_scales": value_scales,
        "sinks": _random((heads,), generator).to(case.dtype) if case.sinks else None,
        "tree_mask": _tree(case, generator) if case.tree else None,
        "out": torch.full((num_tokens, heads, case.dims[1]), float("nan"), dtype=case.dtype),
    }
    moved = {name: None if part is None else part.to(device) for name, part in arguments.items()}
    return {
        **moved,
        **case.rules,
        "scale": case.dims[0] ** -0.5,
        "max_query_len": max(case.query_lens),
        "max_context_len": max(case.contexts),
    }


def expected(arguments: dict[str, Any]) -> Tensor:
    """The reference in fp64."""
    ours = ("max_query_len", "max_context_len", "out")
    wide = {name: value for name, value in arguments.items() if name not in ours}
    return reference_attention(**{**wide, "q": arguments["q"].double()})


def error(out: Tensor, reference: Tensor) -> float:
    """Relative error in the 2-norm; NaN counts as infinite."""
    value = float((out.double() - reference).norm() / reference.norm().clamp_min(1e-30))
    return math.inf if math.isnan(value) else value


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _layout(case: Case, generator: torch.Generator) -> tuple[Tensor | None, tuple[int, int], Tensor]:
    """Block tables, (blocks, tokens a block) of the pool, and which tokens `[blocks, tokens]` a context covers."""
    if case.block_size == 0:
        capacity = max(case.contexts) + 5
        used = torch.arange(capacity) < torch.tensor(case.contexts)[:, None]
        return None, (len(case.contexts), capacity), used
    needed = [-(-context // case.block_size) for context in case.contexts]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    tables = torch.full((len(needed), max(needed) + 1), WILD_BLOCK, dtype=torch.int32)
    used = torch.zeros(num_blocks, case.block_size, dtype=torch.bool)
    first = 0
    for row, (count, context) in enumerate(zip(needed, case.contexts, strict=True)):
        tables[row, :count] = order[first : first + count]
        flat = torch.arange(count * case.block_size).view(count, case.block_size) < context
        used[tables[row, :count].long()] = flat
        first += count
    return tables, (num_blocks, case.block_size), used


def _pool(
    shape: tuple[int, ...], used: Tensor, case: Case, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    data = _random(shape, generator)
    if case.kv is None:
        data[~used] = float("nan")
        return data.to(case.dtype), None
    limit = 127.0 if case.kv == torch.int8 else 448.0
    scales = (data.abs().amax(dim=-1) / limit).to(case.scale_dtype)
    data = data / scales.float()[..., None]
    stored = data.round().clamp(-127, 127) if case.kv == torch.int8 else data.clamp(-448, 448)
    stored = stored.to(case.kv)
    scales[~used] = float("nan")
    scales = scales.transpose(1, 2)
    if not case.scales_strided:
        scales = scales.contiguous()
    if case.kv != torch.int8:
        stored.view(torch.uint8)[~used] = 0x7F
    return stored, scales


def _tree(case: Case, generator: torch.Generator) -> Tensor:
    """Every new token has a random earlier one as its parent and sees its ancestors and itself."""
    rows: list[int] = []
    for count in case.query_lens:
        masks: list[int] = []
        for token in range(count):
            parent = int(torch.randint(-1, token, (1,), generator=generator)) if token else -1
            bits = (masks[parent] if parent >= 0 else 0) | (1 << token)
            masks.append(bits)
        rows += masks
    return torch.tensor([bits - (1 << 64) if bits >> 63 else bits for bits in rows], dtype=torch.int64)
