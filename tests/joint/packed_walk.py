"""Packed logits of a tiny model against its eager full forward, with and without deliberate mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from infermix.engine.bridge import Joint
from infermix.engine.self_check import relative_error
from infermix.engine.walk import full_logits, packed_logits, random_sequences
from infermix.roles.attention import LayerSpec
from infermix.roles.batch import Batch
from infermix.roles.kv_store import PagedView
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.kv_dense import DenseLayout
from infermix_reference.kv_none import RecomputeLayout
from infermix_reference.kv_paged import PagedLayout
from tiny_models import VOCAB

LENGTHS = (5, 27, 14, 19)
TOLERANCE = 1e-4
ALL_ROWS = 10**6


def layout(name: str | Any) -> Any:
    """A reference layout by name; a layout object as it is."""
    if not isinstance(name, str):
        return name
    return {"paged": PagedLayout(4), "dense": DenseLayout(), "none": RecomputeLayout()}[name]


def packed_error(joint: Joint, attention: Any, layout_name: str | Any, lengths: tuple[int, ...] = LENGTHS) -> float:
    """Relative error over every row of several sequences that join, are chunked, decode and finish."""
    sequences = random_sequences(lengths, VOCAB, seed=3)
    packed = packed_logits(
        joint,
        attention,
        layout(layout_name),
        sequences,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kept_rows=ALL_ROWS,
        chunk=6,
        num_decode=4,
    )
    full = [full_logits(joint, ids, ALL_ROWS) for ids in sequences]
    return relative_error(packed, full)


class WithoutWindow(EagerAttention):
    """Mistake: the sliding window is ignored."""

    def forward(self, q: Any, view: Any, batch: Batch, layer: LayerSpec) -> Any:
        return super().forward(q, view, batch, replace(layer, window=None))


class WrongWindow(EagerAttention):
    """Mistake: the window does not count the query's own token."""

    def forward(self, q: Any, view: Any, batch: Batch, layer: LayerSpec) -> Any:
        window = None if layer.window is None else layer.window + 1
        return super().forward(q, view, batch, replace(layer, window=window))


class WrongScale(EagerAttention):
    """Mistake: scores are 15 % too large."""

    def forward(self, q: Any, view: Any, batch: Batch, layer: LayerSpec) -> Any:
        return super().forward(q, view, batch, replace(layer, scale=layer.scale * 1.15))


class WithoutSoftcap(EagerAttention):
    """Mistake: the softcap is ignored."""

    def forward(self, q: Any, view: Any, batch: Batch, layer: LayerSpec) -> Any:
        return super().forward(q, view, batch, replace(layer, softcap=None))


class WithoutSinks(EagerAttention):
    """Mistake: the sinks are ignored."""

    def forward(self, q: Any, view: Any, batch: Batch, layer: LayerSpec) -> Any:
        return super().forward(q, view, batch, replace(layer, sinks=None))


class Leaking(EagerAttention):
    """Mistake: each sequence reads the first block of its neighbour."""

    def forward(self, q: Any, view: PagedView, batch: Batch, layer: LayerSpec) -> Any:
        tables = view.block_tables.clone()
        tables[:, 0] = tables[:, 0].roll(1)
        return super().forward(q, PagedView(view.keys, view.values, tables), batch, layer)


class ShiftedJoint(Joint):
    """Mistake: tokens that follow cached ones are placed one position late."""

    def forward(self, batch: Batch, *, checked: bool = False) -> Any:
        continued = [
            context > query for context, query in zip(batch.host_context_lens or (), batch.query_lens, strict=True)
        ]
        shift = torch.tensor(continued).repeat_interleave(torch.tensor(batch.query_lens)).to(torch.int64)
        return super().forward(replace(batch, positions=batch.positions + shift), checked=checked)
