"""The attention conformance check must catch what is easily got wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from infermix.errors import Unsupported
from infermix.plugins import load_catalogue
from infermix.roles.attention import LayerSpec
from infermix.roles.batch import Batch
from infermix.roles.component import Component, Role
from infermix.toolkit.conformance import check_attention
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.attention_sdpa import SdpaAttention
from torch import Tensor

EAGER = load_catalogue().find(Role.ATTENTION, "eager").component


def _component(backend: Any) -> Component:
    return replace(EAGER, build=lambda options, context: backend)


class _LayerMutant(EagerAttention):
    """Changes what the layer asks for."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
        return super().forward(q, view, batch, replace(layer, **self.changes))


class _ScaleMutant(EagerAttention):
    def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
        return super().forward(q, view, batch, replace(layer, scale=layer.scale * 1.01))


class _ShiftedMutant(EagerAttention):
    """Sees one key too many: the window is off by one."""

    def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
        window = layer.window and layer.window + 1
        return super().forward(q, view, batch, replace(layer, window=window))


class _LeakMutant(EagerAttention):
    """Every sequence reads the first one's keys."""

    def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
        if hasattr(view, "block_tables"):
            view = replace(view, block_tables=view.block_tables[:1].expand_as(view.block_tables))
        return super().forward(q, view, batch, layer)


class _NoncausalMutant(EagerAttention):
    """A prefill that sees the future."""

    def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
        out = super().forward(q, view, batch, layer)
        return out.flip(0) if batch.query_len and batch.query_len > 3 else out


class _StaleMutant(EagerAttention):
    """Reads the context lengths once and keeps them."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
        if not batch.captured:
            return super().forward(q, view, batch, layer)
        first = self.seen.setdefault(id(batch.context_lens), batch.context_lens.clone())
        return super().forward(q, view, replace(batch, context_lens=first), layer)


class _LivePaddingMutant(EagerAttention):
    """Padded rows return something."""

    def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
        out = super().forward(q, view, batch, layer)
        return out + 1e-3 * (out == 0)


MUTANTS = {
    "no window": _LayerMutant(window=None),
    "no softcap": _LayerMutant(softcap=None),
    "no sinks": _LayerMutant(sinks=None),
    "scale off by one percent": _ScaleMutant(),
    "window off by one": _ShiftedMutant(),
    "reads another sequence": _LeakMutant(),
    "sees the future": _NoncausalMutant(),
    "causal where both directions are asked for": _LayerMutant(causal=True),
    "keeps old context lengths": _StaleMutant(),
    "padded rows are not zero": _LivePaddingMutant(),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    with pytest.raises(AssertionError):
        check_attention(_component(MUTANTS[name]))


def test_unmasked_memory_is_caught() -> None:
    class Unmasked(EagerAttention):
        """Multiplies a weight of zero with whatever lies beyond the context."""

        def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
            if not batch.captured:
                return super().forward(q, view, batch, layer)
            _, values = view.batched(batch.context_capacity)
            return super().forward(q, view, batch, layer) + 0 * values.sum()

    with pytest.raises(AssertionError, match="NaN"):
        check_attention(_component(Unmasked()))


def test_ignored_feature_is_caught() -> None:
    modest = replace(EAGER, provides=lambda options, model, machine: frozenset({"head_dim:*"}))
    with pytest.raises(AssertionError, match="does not provide attn:sliding_window and ignores it"):
        check_attention(modest)


def test_sdpa_refuses_softcap() -> None:
    layer = LayerSpec(0, 0, 4, 2, 64, 64, 0.1, softcap=3.0)
    with pytest.raises(Unsupported, match="softcap"):
        SdpaAttention().forward(torch.zeros(1, 4, 64), None, None, layer)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_reference_backends_in_bf16_with_odd_blocks(name: str) -> None:
    component = load_catalogue().find(Role.ATTENTION, name).component
    only_bf16 = replace(component, needs=lambda o, m, h: component.needs(o, m, h) | {"dtype:bfloat16"})
    check_attention(only_bf16, block_sizes=(1, 5, 16, 64), seed=3)
