"""Random groups and tails in every shape, with everything that must not be read poisoned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from attention_cases import TOLERANCE as PLAIN_TOLERANCE
from attention_cases import WILD_BLOCK
from infermix_kernels.reference.grouped import GroupedPools, grouped_attention, pack
from torch import Tensor

#: As `attention_cases.TOLERANCE`, but with 16-bit queries, keys, values and scaled queries are rounded to fp16 too:
#: 2^-12 each, twice in scores of a deviation of about two.
TOLERANCE = {**PLAIN_TOLERANCE, torch.float16: 1.5e-3}


@dataclass(frozen=True)
class GroupedCase:
    """`recent` tokens are always in the tail, which holds `recent + 2 * group_size`."""

    name: str
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    bits: int = 4
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    group_size: int = 16
    block_size: int = 32
    recent: int = 20
    dtype: torch.dtype = torch.float32
    rules: dict[str, Any] = field(default_factory=dict)
    sinks: bool = False
    launch: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name


def build(case: GroupedCase, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Keyword arguments of `grouped_attention`, `out` filled with NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    pools = _empty(case, sum(-(-context // case.block_size) for context in case.contexts) + 2)
    order = torch.randperm(len(pools.keys) * case.group_size // case.block_size, generator=generator)
    needed = [-(-context // case.block_size) for context in case.contexts]
    tables = torch.full((len(needed), max(needed) + 1), WILD_BLOCK, dtype=torch.int32)
    rows = torch.randperm(len(pools.tail_keys), generator=generator)[: len(needed)].to(torch.int32)
    first = 0
    for index, (count, context) in enumerate(zip(needed, case.contexts, strict=True)):
        tables[index, :count] = order[first : first + count]
        _fill(pools, tables[index], int(rows[index]), context, generator)
        first += count
    num_tokens = sum(case.query_lens)
    arguments = {
        "q": torch.randn(num_tokens, case.heads[0], case.dims[0], generator=generator).to(case.dtype),
        "cu_seqlens_q": torch.tensor((0, *case.query_lens)).cumsum(0).to(torch.int32),
        "context_lens": torch.tensor(case.contexts, dtype=torch.int32),
        "block_tables": tables,
        "tail_rows": torch.stack((rows, rows + WILD_BLOCK), dim=1)[:, 0],
        "sinks": torch.randn(case.heads[0], generator=generator).to(case.dtype) if case.sinks else None,
        "out": torch.full((num_tokens, case.heads[0], case.dims[1]), float("nan"), dtype=case.dtype),
    }
    moved = {name: None if part is None else part.to(device) for name, part in arguments.items()}
    return {
        **moved,
        **case.rules,
        "pools": _moved(pools, device),
        "scale": case.dims[0] ** -0.5,
        "max_query_len": max(case.query_lens),
        "max_context_len": max(case.contexts),
    }


def expected(arguments: dict[str, Any]) -> Tensor:
    """The reference in fp64."""
    ours = ("max_query_len", "max_context_len", "out", "launch", "workspace")
    wide = {name: value for name, value in arguments.items() if name not in ours}
    return grouped_attention(**{**wide, "q": arguments["q"].double()})


def _empty(case: GroupedCase, num_blocks: int) -> GroupedPools:
    groups, (_, heads), size = num_blocks * case.block_size // case.group_size, case.heads, case.group_size
    tail = (len(case.contexts) + 1, case.recent + 2 * size, heads)

    def poison(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    return GroupedPools(
        torch.full((groups, heads, size, case.dims[0] * case.bits // 8), 0xA5, dtype=torch.uint8),
        torch.full((groups, heads, size, case.dims[1] * case.bits // 8), 0xA5, dtype=torch.uint8),
        poison(groups, heads, case.dims[0], 2, dtype=torch.float16),
        poison(groups, heads, size, case.dims[1] // size, 2, dtype=torch.float16),
        poison(*tail, case.dims[0], dtype=case.dtype),
        poison(*tail, case.dims[1], dtype=case.dtype),
        case.block_size,
        case.recent,
    )


def _fill(pools: GroupedPools, blocks: Tensor, row: int, context: int, generator: torch.Generator) -> None:
    """Random contents of one sequence: its whole groups, and its tail."""
    size, bits = pools.group_size, pools.bits
    flushed, per_block = pools.num_flushed(context), pools.block_size // size
    for number in range(flushed // size):
        group = int(blocks[number // per_block]) * per_block + number % per_block
        for pool, factors in ((pools.keys, pools.key_factors), (pools.values, pools.value_factors)):
            numbers = torch.randint(0, 2**bits, (*pool.shape[1:3], pool.shape[3] * 8 // bits), generator=generator)
            pool[group] = pack(numbers.to(torch.uint8), bits)
            spread = torch.rand(factors.shape[1:-1], generator=generator) * 0.5 + 0.1
            zeros = torch.randn(factors.shape[1:-1], generator=generator) - spread * 2 ** (bits - 1)
            factors[group] = torch.stack((spread, zeros), dim=-1).half()
    recent = torch.arange(flushed, context) % pools.tail_keys.shape[1]
    for tail in (pools.tail_keys, pools.tail_values):
        tail[row, recent] = torch.randn(len(recent), *tail.shape[2:], generator=generator).to(tail.dtype)


def _moved(pools: GroupedPools, device: str) -> GroupedPools:
    names = ("keys", "values", "key_factors", "value_factors", "tail_keys", "tail_values")
    return GroupedPools(*(getattr(pools, name).to(device) for name in names), pools.block_size, pools.num_recent)
