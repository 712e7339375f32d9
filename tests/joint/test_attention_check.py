"""The attention part alone: in bf16, what hides in the rounding of a whole model is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import packed_walk as walk
import pytest
import torch
from infermix.engine.attention_check import check_attention_part, distinct_layers
from infermix.engine.bridge import Joint
from infermix.engine.self_check import LOSSY, self_check
from infermix.errors import WrongResult
from infermix.roles.attention import LayerSpec
from infermix.roles.batch import Batch
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.attention_sdpa import SdpaAttention
from infermix_reference.kv_none import RecomputeLayout
from infermix_reference.kv_paged import PagedLayout
from tiny_models import tiny_model
from torch import Tensor

CPU = torch.device("cpu")
LENGTHS = (5, 27, 14)


class SlightlyWrongScale(SdpaAttention):
    """Mistake: scores are 2 % too large."""

    def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
        return super().forward(q, view, batch, replace(layer, scale=layer.scale * 1.02))


class SlightlyWrongCapped(EagerAttention):
    """Mistake: the same, for layers with a softcap."""

    def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
        return super().forward(q, view, batch, replace(layer, scale=layer.scale * 1.02))


class Blind(EagerAttention):
    """Mistake: a single new token does not see itself."""

    def forward(self, q: Tensor, view: Any, batch: Batch, layer: LayerSpec) -> Tensor:
        assert batch.host_context_lens is not None
        pairs = zip(batch.query_lens, batch.host_context_lens, strict=True)
        lens = tuple(context - (query == 1 and context > 1) for query, context in pairs)
        moved = replace(batch, host_context_lens=lens, context_lens=torch.tensor(lens, dtype=torch.int32), extra={})
        return super().forward(q, view, moved, layer)


class ShiftedLayout(PagedLayout):
    """Mistake: tokens that follow cached ones are stored one position late."""

    def store(self, shape: Any, device: Any, dtype: Any) -> Any:
        store: Any = super().store(shape, device, dtype)
        write = store.write

        def shifted(layer_idx: int, k: Tensor, v: Tensor, batch: Batch, group: Any) -> None:
            assert batch.host_context_lens is not None
            late = [c > q for c, q in zip(batch.host_context_lens, batch.query_lens, strict=True)]
            shift = torch.tensor(late).repeat_interleave(torch.tensor(batch.query_lens)).long()
            write(layer_idx, k, v, batch, replace(group, slot_mapping=group.slot_mapping + shift))

        store.write = shifted
        return store


def check(
    model: Any,
    attention: Any,
    layout: Any = None,
    lengths: tuple[int, ...] = LENGTHS,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> dict[str, Any]:
    joint = Joint(model.to(dtype))
    return check_attention_part(
        joint, attention, layout or PagedLayout(4), lengths, device=CPU, dtype=dtype, seed=seed
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [EagerAttention, SdpaAttention])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "deepseek_v3"])
def test_right_parts_keep_their_distance_to_the_tolerance(family: str, backend: Any, dtype: torch.dtype) -> None:
    found = [check(tiny_model(family), backend(), dtype=dtype, seed=seed) for seed in range(3)]
    assert all(0 < each["relative_error"] < each["tolerance"] / 2 for each in found)


def test_a_layout_that_recomputes_passes() -> None:
    assert check(tiny_model("llama"), EagerAttention(), RecomputeLayout())["layers"] == 1


@pytest.mark.parametrize(
    ("family", "mutant"),
    [
        ("llama", SlightlyWrongScale),
        ("gpt_oss", SlightlyWrongScale),
        ("deepseek_v3", SlightlyWrongScale),
        ("gemma2", SlightlyWrongCapped),
        ("gemma2", walk.WithoutSoftcap),
        ("gpt_oss", walk.WithoutSinks),
        ("mistral", walk.WrongWindow),
        ("llama", Blind),
        ("llama", walk.Leaking),
    ],
)
def test_mistakes_are_caught_in_bf16(family: str, mutant: Any) -> None:
    for seed in range(3):
        with pytest.raises(WrongResult, match="differs from plain attention"):
            check(tiny_model(family), mutant(), seed=seed)


def test_shifted_positions_are_caught_in_bf16() -> None:
    with pytest.raises(WrongResult, match="differs from plain attention"):
        check(tiny_model("llama"), EagerAttention(), ShiftedLayout(4))


@pytest.mark.parametrize("window", [16, 1024])
def test_a_window_of_one_token_too_many_is_caught_in_bf16(window: int) -> None:
    model = tiny_model("mistral", sliding_window=window, max_position_embeddings=2048)
    lengths = (*LENGTHS, window + 5)
    check(model, EagerAttention(), PagedLayout(16), lengths)
    with pytest.raises(WrongResult):
        check(model, walk.WrongWindow(), PagedLayout(16), lengths)


def test_one_layer_of_each_kind_is_checked() -> None:
    plain = LayerSpec(0, 0, 4, 2, 8, 8, 0.5)
    layers = [
        plain,
        replace(plain, layer_idx=1),
        replace(plain, layer_idx=2, scale=0.25),
        replace(plain, layer_idx=3),
    ]
    assert distinct_layers({layer.layer_idx: layer for layer in layers}) == [layers[0], layers[2]]
    assert check(tiny_model("gemma2"), EagerAttention())["layers"] == 2


def test_the_self_check_holds_it_or_says_why_not() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    parts: Any = (EagerAttention(), PagedLayout(4))
    report = self_check(model, Joint(model), *parts, device=CPU, dtype=torch.bfloat16)
    assert report["attention"]["relative_error"] <= report["attention"]["tolerance"] == 2**-7
    lossy = self_check(model, Joint(model), *parts, device=CPU, dtype=torch.bfloat16, exact=False)
    assert lossy["attention"] == LOSSY
    with pytest.raises(WrongResult, match="SlightlyWrongScale over PagedLayout"):
        self_check(model, Joint(model), SlightlyWrongScale(), parts[1], device=CPU, dtype=torch.bfloat16)
