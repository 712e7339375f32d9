"""Attention through the kernels of `infermix_kernels`: paged, quantized, grouped and dense views, read in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from infermix.errors import Unsupported
from infermix.roles.attention import LayerSpec, TuneContext
from infermix.roles.batch import MAX_TREE_TOKENS, Batch
from infermix.roles.kv_grouped import GroupedView
from infermix.roles.kv_store import DenseView, PagedView, QuantizedPagedView, View
from infermix_kernels.attention import Workspace, paged_attention
from infermix_kernels.attention_grouped import GroupedPools, grouped_attention
from infermix_kernels.launch import LaunchTable
from torch import Tensor

#: Longest query that is computed together with the decodes at the head of a mixed batch.
_SHORT_QUERY = 16


@dataclass(frozen=True, slots=True)
class _Part:
    """Sequences `first ... last` of a batch, all short or all long, with their bounds on the host.

    `tree_mask` is the whole batch's, `None` for long ones.
    """

    first: int
    last: int
    max_query_len: int
    max_context_len: int
    cu_seqlens_q: Tensor
    context_lens: Tensor
    tree_mask: Tensor | None


class TritonAttention:
    """Window, softcap, sinks, any head grouping, Dk != Dv, in fp32, fp16 and bf16.

    `launches` is the folder of measured launch parameters. The workspace of split contexts is allocated once per
    device, at the first call, which a captured step makes before its capture; calls must not overlap. A view that
    only its layout knows is gathered into dense keys and values first.
    """

    reads: tuple[type, ...] = (DenseView, PagedView, QuantizedPagedView, GroupedView)

    def __init__(self, launches: Path, *, check_block_tables: bool = False) -> None:
        self._folder, self._check = launches, check_block_tables
        self._workspaces: dict[torch.device, tuple[Workspace, LaunchTable]] = {}

    def tune(self, context: TuneContext) -> Mapping[str, Any]:
        """Measure launch parameters that this machine's file lacks; every later call finds them."""
        from infermix_triton.measured import tune_attention

        facts = tune_attention(context)
        self._workspaces.clear()  # tables are read when they are opened
        return facts

    def forward(self, q: Tensor, view: View, batch: Batch, layer: LayerSpec) -> Tensor:
        if not layer.causal:
            raise Unsupported("attention triton is causal; use attention: sdpa")
        if not hasattr(view, "batched"):
            raise Unsupported("attention triton reads paged and dense KV; use kv: paged or kv: dense")
        if not self._in_place(view):
            view = DenseView(*view.batched(_capacity(batch)))
        if batch.tree_mask is not None and layer.window is not None:
            raise Unsupported("attention triton has no tree mask beside a sliding window; use attention: sdpa")
        if q.stride(2) != 1:
            q = q.contiguous()
        out = q.new_empty(q.shape[0], q.shape[1], layer.value_dim)
        for part in _parts(batch):
            if isinstance(view, GroupedView):
                self._compute_grouped(q, view, part, layer, out)
            else:
                self._compute(q, view, part, layer, out)
        return out

    def _in_place(self, view: View) -> bool:
        return view.in_words if isinstance(view, GroupedView) else isinstance(view, self.reads)

    def _compute_grouped(self, q: Tensor, view: GroupedView, part: _Part, layer: LayerSpec, out: Tensor) -> None:
        if part.tree_mask is not None:
            raise Unsupported("attention triton has no tree mask over groups of quantized tokens")
        rows = slice(part.first, part.last)
        grouped_attention(
            q,
            GroupedPools(
                view.keys, view.values, view.key_factors, view.value_factors, view.tail_keys, view.tail_values,
                view.block_size, view.num_recent,
            ),
            cu_seqlens_q=part.cu_seqlens_q,
            context_lens=part.context_lens,
            block_tables=view.block_tables[rows],
            tail_rows=view.tail_rows[rows],
            scale=layer.scale,
            max_query_len=part.max_query_len,
            max_context_len=part.max_context_len,
            window=layer.window,
            softcap=layer.softcap,
            sinks=layer.sinks,
            out=out,
            workspace=self._persistent(q.device)[0],
            check_block_tables=self._check,
        )  # fmt: skip

    def _compute(self, q: Tensor, view: Any, part: _Part, layer: LayerSpec, out: Tensor) -> None:
        rows = slice(part.first, part.last)
        dense = isinstance(view, DenseView)
        tables = None if dense else view.block_tables
        key_scales, value_scales = None, None
        if isinstance(view, QuantizedPagedView):
            key_scales, value_scales = view.key_scales, view.value_scales
        workspace, launches = self._persistent(q.device)
        paged_attention(
            q,
            view.keys[rows] if dense else view.keys,
            view.values[rows] if dense else view.values,
            cu_seqlens_q=part.cu_seqlens_q,
            context_lens=part.context_lens,
            block_tables=None if tables is None else tables[rows],
            scale=layer.scale,
            max_query_len=part.max_query_len,
            max_context_len=part.max_context_len,
            window=layer.window,
            softcap=layer.softcap,
            sinks=layer.sinks,
            tree_mask=part.tree_mask,
            key_scales=key_scales,
            value_scales=value_scales,
            out=out,
            workspace=workspace,
            launches=launches,
            check_block_tables=self._check,
        )

    def _persistent(self, device: torch.device) -> tuple[Workspace, LaunchTable]:
        if device not in self._workspaces:
            self._workspaces[device] = Workspace.allocate(device), LaunchTable(self._folder, device)
        return self._workspaces[device]


def _capacity(batch: Batch) -> int:
    return batch.context_capacity if batch.host_context_lens is None else max(batch.host_context_lens)


def _parts(batch: Batch) -> tuple[_Part, ...]:
    """Leading short queries and the rest, once per batch; a captured batch is one part, whatever its lengths."""
    parts = batch.extra.get(_parts)
    if parts is None:
        parts = batch.extra[_parts] = tuple(_split(batch))
    return parts


def _split(batch: Batch) -> list[_Part]:
    lens = batch.query_lens
    if batch.query_len is not None or batch.captured:
        bounds = [(0, batch.num_seqs)]
    elif batch.tree_mask is not None:
        bounds = _runs([length <= MAX_TREE_TOKENS for length in lens])
    else:
        short = next((index for index, length in enumerate(lens) if length > _SHORT_QUERY), batch.num_seqs)
        bounds = [pair for pair in ((0, short), (short, batch.num_seqs)) if pair[0] < pair[1]]
    return [_part(batch, first, last) for first, last in bounds]


def _part(batch: Batch, first: int, last: int) -> _Part:
    contexts = batch.host_context_lens
    longest = max(batch.query_lens[first:last])
    return _Part(
        first,
        last,
        longest,
        batch.context_capacity if contexts is None else max(contexts[first:last]),
        batch.cu_seqlens_q[first : last + 1],
        batch.context_lens[first:last],
        batch.tree_mask if longest <= MAX_TREE_TOKENS else None,
    )


def _runs(flags: list[bool]) -> list[tuple[int, int]]:
    """Bounds of the stretches of equal flags."""
    cuts = [0, *(index for index in range(1, len(flags)) if flags[index] != flags[index - 1]), len(flags)]
    return list(pairwise(cuts))
