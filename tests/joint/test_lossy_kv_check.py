"""The load-time check of quantized KV: right ones pass, and what is wrong with one is not taken for loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from infermix.engine.bridge import Joint
from infermix.engine.self_check import self_check
from infermix.errors import WrongResult
from infermix.plugins import load_catalogue
from infermix.roles.batch import Batch
from infermix.roles.component import Role
from infermix.roles.kv_store import QuantizedPagedView
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.attention_sdpa import SdpaAttention
from tiny_models import tiny_model
from torch import Tensor

PARTS = {
    "int8": ("quantized", {"dtype": "int8", "block_size": 4}),
    "fp8": ("quantized", {"dtype": "fp8", "block_size": 4}),
    "int4": ("kivi", {"bits": 4, "group_size": 4, "residual_length": 12, "block_size": 8}),
    "int2": ("kivi", {"bits": 2, "group_size": 4, "residual_length": 12, "block_size": 8}),
}


def check(name: str, attention: Any, dtype: torch.dtype = torch.float32, change: Any = None, **given: Any) -> Any:
    component = load_catalogue().find(Role.KV, PARTS[name][0]).component
    options = component.options(**PARTS[name][1])
    layout = component.build(options, None)
    model = tiny_model("llama").to(dtype)
    return self_check(
        model,
        Joint(model),
        attention,
        Changed(layout, change) if change else layout,
        device=torch.device("cpu"),
        dtype=dtype,
        exact=False,
        kv_error=component.kv_error(options),
        **given,
    )


class Changed:
    """A layout whose store is `change(store)`."""

    def __init__(self, layout: Any, change: Any) -> None:
        self.shape, self.space = layout.shape, layout.space
        self._layout, self._change = layout, change

    def store(self, *given: Any) -> Any:
        store = self._layout.store(*given)
        self._change(store)
        return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_right_parts_pass(name: str, dtype: torch.dtype) -> None:
    for attention in (EagerAttention(), SdpaAttention()):
        report = check(name, attention, dtype)
        alone = report["attention"]
        assert 0 < alone["kv_error"] <= alone["kv_error_stated"]
        assert alone["relative_error"] <= alone["tolerance"] < 0.02
        assert 0 < report["relative_error"] <= report["tolerance"]


class Blind(EagerAttention):
    """Mistake: a single new token does not see itself."""

    def forward(self, q: Tensor, view: Any, batch: Batch, layer: Any) -> Tensor:
        assert batch.host_context_lens is not None
        pairs = zip(batch.query_lens, batch.host_context_lens, strict=True)
        lens = tuple(context - (query == 1 and context > 1) for query, context in pairs)
        moved = replace(batch, host_context_lens=lens, context_lens=torch.tensor(lens, dtype=torch.int32), extra={})
        return super().forward(q, view, moved, layer)


class Swapping(EagerAttention):
    """Mistake: keys are read with the scales of values, and values with those of keys."""

    def forward(self, q: Tensor, view: QuantizedPagedView, batch: Batch, layer: Any) -> Tensor:
        swapped = replace(view, key_scales=view.value_scales, value_scales=view.key_scales)
        return super().forward(q, swapped, batch, layer)


@pytest.mark.parametrize(
    ("name", "attention"), [*((name, Blind()) for name in ("int8", "fp8")), ("int8", Swapping()), ("fp8", Swapping())]
)
def test_a_backend_that_reads_wrongly_fails(name: str, attention: Any) -> None:
    with pytest.raises(WrongResult, match="self-check failed"):
        check(name, attention)


def swap_scales(store: Any) -> None:
    """Mistake of the store: written the right way, read with the other's scales."""
    view = store.view

    def wrong(*given: Any) -> Any:
        right = view(*given)
        return replace(right, key_scales=right.value_scales, value_scales=right.key_scales)

    store.view = wrong


def forget_zero(store: Any) -> None:
    """Mistake of KIVI's store: zero points are not added."""
    read = store.view

    def wrong(*given: Any) -> Any:
        right = read(*given)
        scales = right.value_factors * torch.tensor([1, 0], dtype=torch.float16)
        return replace(right, value_factors=scales)

    store.view = wrong


@pytest.mark.parametrize(
    ("name", "change"),
    [("int8", swap_scales), ("fp8", swap_scales), ("int4", forget_zero), ("int2", forget_zero)],
)
def test_a_store_that_gives_back_wrongly_fails(name: str, change: Any) -> None:
    with pytest.raises(WrongResult, match="self-check failed"):
        check(name, EagerAttention(), change=change)


def fused_shortcut(store: Any) -> None:
    """Mistake of whoever writes past `write`: both scales land in the keys' place."""
    write = store.write

    def wrong(layer_idx: int, k: Tensor, v: Tensor, batch: Batch, group: Any) -> None:
        write(layer_idx, k, v, batch, group)
        pools = store.pools(layer_idx)
        pools.value_scales.copy_(pools.key_scales)

    store.hidden_write = wrong


def test_a_wrong_short_cut_past_write_is_caught() -> None:
    """The joint takes the short cut where a layer leaves its rotation to it; the yardstick does not."""

    class ShortCut(Joint):
        def attach(self, attention: Any, store: Any) -> None:
            if hasattr(store, "hidden_write"):
                store.write = store.hidden_write
            super().attach(attention, store)

    component = load_catalogue().find(Role.KV, "quantized").component
    options = component.options(block_size=4)
    model = tiny_model("llama")
    with pytest.raises(WrongResult, match="packed logits differ"):
        self_check(
            model,
            ShortCut(model),
            EagerAttention(),
            Changed(component.build(options, None), fused_shortcut),
            device=torch.device("cpu"),
            dtype=torch.float32,
            exact=False,
            kv_error=component.kv_error(options),
        )
