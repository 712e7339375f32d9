"""Decode attention over the KV layouts that have kernels of their own: random pools, calls, bytes, errors.

Shapes are those of Llama-3-8B, and of DeepSeek-V3's rows for latent attention; tiny ones without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import kernel_attention
import torch
from infermix_kernels.attention import Workspace, paged_attention
from infermix_kernels.attention_grouped import GroupedPools, grouped_attention
from infermix_kernels.launch import Launch
from infermix_kernels.reference.attention import paged_attention as reference_attention
from infermix_kernels.reference.grouped import grouped_attention as reference_grouped
from kernel_timing import DEVICE, DTYPE, GPU, relative_error
from torch import Tensor

HEADS, KV_HEADS, DIM = kernel_attention.HEADS, kernel_attention.KV_HEADS, kernel_attention.DIM if GPU else 32
GROUP, TAIL = (32, 128) if GPU else (16, 32)
LATENT, REST = (512, 64) if GPU else (32, 16)
DTYPES = {"bf16": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass
class Grouped:
    """Sequences of one context in groups of 4 or 2 bits, the last TAIL - 2 GROUP tokens and more as they came."""

    q: Tensor
    pools: GroupedPools
    tables: Tensor
    contexts: Tensor
    order: Tensor
    context_len: int

    @property
    def num_bytes(self) -> int:
        """What one call has to read: groups that are old, of the tail what is not."""
        batch, flushed = self.contexts.shape[0], self.pools.num_flushed(self.context_len)
        parts = (self.pools.keys, self.pools.values, self.pools.key_factors, self.pools.value_factors)
        group_bytes = sum(part[0].numel() * part.element_size() for part in parts)
        recent = 2 * (self.context_len - flushed) * KV_HEADS * DIM * self.q.element_size()
        return batch * (flushed // self.pools.group_size * group_bytes + recent)

    def ours(self, workspace: Workspace, launch: Launch | None = None) -> Tensor:
        return grouped_attention(
            self.q,
            self.pools,
            cu_seqlens_q=self.order,
            context_lens=self.contexts,
            block_tables=self.tables,
            tail_rows=self.order,
            scale=DIM**-0.5,
            max_query_len=1,
            max_context_len=self.context_len,
            out=torch.empty_like(self.q),
            workspace=workspace,
            launch=launch,
        )

    def error(self, out: Tensor) -> float:
        """Of the last sequence, against fp32."""
        reference = reference_grouped(
            self.q[-1:].float(),
            self.pools,
            cu_seqlens_q=torch.tensor([0, 1]),
            context_lens=self.contexts[-1:],
            block_tables=self.tables[-1:],
            tail_rows=torch.tensor([self.contexts.shape[0] - 1]),
            scale=DIM**-0.5,
        )
        return relative_error(out[-1:], reference)


@dataclass
class Latent:
    """Rows of LATENT + REST numbers that are keys, and values in their first part; one KV head."""

    q: Tensor
    rows: Tensor
    tables: Tensor
    contexts: Tensor
    order: Tensor
    context_len: int

    @property
    def num_bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()

    def ours(self, workspace: Workspace, launch: Launch | None = None) -> Tensor:
        return paged_attention(
            self.q,
            self.rows,
            self.rows[..., :LATENT],
            cu_seqlens_q=self.order,
            context_lens=self.contexts,
            block_tables=self.tables,
            scale=(LATENT + REST) ** -0.5,
            max_query_len=1,
            max_context_len=self.context_len,
            out=self.q.new_empty(*self.q.shape[:2], LATENT),
            workspace=workspace,
            launch=launch,
        )

    def error(self, out: Tensor) -> float:
        reference = reference_attention(
            self.q[-1:].float(),
            self.rows,
            self.rows[..., :LATENT],
            cu_seqlens_q=torch.tensor([0, 1]),
            context_lens=self.contexts[-1:],
            block_tables=self.tables[-1:],
            scale=(LATENT + REST) ** -0.5,
        )
        return relative_error(out[-1:], reference)


def make(kv: str, batch: int, context: int, block: int) -> kernel_attention.Paged | Grouped | Latent:
    """`kv`: bf16, int8, fp8, int4, int2, or latent16 and latent128 by their query heads."""
    torch.manual_seed(0)
    if kv.startswith("latent"):
        return _latent(int(kv.removeprefix("latent")) if GPU else 4, batch, context, block)
    if kv in DTYPES:
        return kernel_attention.make(batch, 1, context, block, DTYPES[kv])
    return _grouped(int(kv.removeprefix("int")), batch, context, block)


def _tables(batch: int, context: int, block: int) -> Tensor:
    width = -(-context // block)
    return torch.randperm(batch * width, device=DEVICE).to(torch.int32).view(batch, width)


def _contexts(batch: int, context: int) -> Tensor:
    return torch.full((batch,), context, device=DEVICE, dtype=torch.int32)


def _order(batch: int) -> Tensor:
    """0, 1, ... batch: where queries of one token start, and rows of tails."""
    return torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)


def _grouped(bits: int, batch: int, context: int, block: int) -> Grouped:
    groups = batch * -(-context // block) * block // GROUP
    packed = partial(torch.randint, 0, 256, (groups, KV_HEADS, GROUP, DIM * bits // 8), device=DEVICE)
    spread, tail = partial(torch.rand, device=DEVICE), partial(torch.randn, device=DEVICE, dtype=DTYPE)
    rows = (batch + 1, TAIL, KV_HEADS, DIM)
    pools = GroupedPools(
        packed(dtype=torch.uint8),
        packed(dtype=torch.uint8),
        (spread(groups, KV_HEADS, DIM, 2) * 0.2 - 0.1).half(),
        (spread(groups, KV_HEADS, GROUP, DIM // GROUP, 2) * 0.2 - 0.1).half(),
        tail(rows),
        tail(rows),
        block,
        TAIL - 2 * GROUP if TAIL > 2 * GROUP else 1,
    )
    q = torch.randn(batch, HEADS, DIM, device=DEVICE).to(DTYPE)
    return Grouped(q, pools, _tables(batch, context, block), _contexts(batch, context), _order(batch), context)


def _latent(heads: int, batch: int, context: int, block: int) -> Latent:
    rows = torch.randn(batch * -(-context // block), block, 1, LATENT + REST, device=DEVICE, dtype=DTYPE)
    q = torch.randn(batch, heads, LATENT + REST, device=DEVICE).to(DTYPE)
    return Latent(q, rows, _tables(batch, context, block), _contexts(batch, context), _order(batch), context)
