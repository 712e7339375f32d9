"""Rings of blocks under real modeling code: the logits of `paged`, far beyond the window, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import infermix_kv.hybrid
import pytest
import torch
from infermix.engine.bridge import Joint
from infermix.engine.packing import PackEntry, pack
from infermix.engine.walk import packed_logits, random_sequences
from infermix.errors import UserError
from infermix.roles.kv_space import KVBudget
from infermix_kv.hybrid import HybridLayout
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.attention_sdpa import SdpaAttention
from infermix_reference.kv_paged import PagedLayout
from tiny_models import VOCAB, WINDOW, tiny_model

CPU = torch.device("cpu")
#: Windows beside full layers (with softcap, sinks, experts), and windows alone.
MIXED = ("gemma2", "gemma3_text", "gpt_oss", "qwen2")
ALL_WINDOWS = ("mistral", "phi3")
LENGTHS = (90, 33, 61)
CHUNK = 6


class PoisonedLayout(HybridLayout):
    """Memory that nobody wrote is NaN."""

    def store(self, shape: Any, device: Any, dtype: Any) -> Any:
        store = super().store(shape, device, dtype)
        for pools in store._pools.values():
            for pool in pools:
                pool.fill_(float("nan"))
        return store


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


def joint_of(models: dict[str, Any], family: str) -> Joint:
    if family not in models:
        models[family] = tiny_model(family)
    return Joint(models[family])


def walked(joint: Joint, layout: Any, attention: Any = None, num_decode: int = 20) -> torch.Tensor:
    sequences = random_sequences(LENGTHS, VOCAB, seed=3)
    logits = packed_logits(
        joint, attention or EagerAttention(), layout, sequences, device=CPU, dtype=torch.float32, kept_rows=10**6,
        chunk=CHUNK, num_decode=num_decode,
    )  # fmt: skip
    return torch.cat(logits)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("family", [*MIXED, *ALL_WINDOWS])
def test_logits_equal_those_of_paged(models: dict[str, Any], family: str, block_size: int) -> None:
    joint = joint_of(models, family)
    attention = EagerAttention() if family == "gemma2" or block_size == 4 else SdpaAttention()
    layout = PoisonedLayout(block_size, max_chunk_tokens=CHUNK)
    assert layout.shape(joint.groups, KVBudget(3, 90, 4, max_query_len=CHUNK)).max_query_len == CHUNK
    expected = walked(joint, PagedLayout(block_size), attention)
    assert torch.allclose(walked(joint, layout, attention), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_a_ring_that_is_too_short_is_noticed(
    models: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = joint_of(models, family)
    expected = walked(joint, PagedLayout(1))
    exact = infermix_kv.hybrid.ring_blocks
    monkeypatch.setattr(infermix_kv.hybrid, "ring_blocks", lambda *given: exact(*given) - 1)
    assert (walked(joint, HybridLayout(1, CHUNK)) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", MIXED)
def test_bytes_of_a_ring_are_constant_in_the_context(models: dict[str, Any], family: str) -> None:
    joint = joint_of(models, family)
    layout = HybridLayout(4, CHUNK)
    short, long = (layout.shape(joint.groups, KVBudget(3, length, 4)) for length in (64, 128))
    ring = [index for index, group in enumerate(joint.groups) if group.window is not None]
    paged = [index for index, group in enumerate(joint.groups) if group.window is None]
    blocks = -(-(WINDOW + CHUNK - 1) // 4)
    for shape, per_seq in ((short, 16), (long, 32)):
        assert {shape.blocks_of(shape.table_of(index)) for index in ring} == {3 * blocks}
        assert {shape.blocks_of(shape.table_of(index)) for index in paged} == {3 * per_seq}
        assert layout.store(shape, "meta", torch.float32).allocated_bytes() == shape.bytes
    full = sum(joint.groups[index].bytes_per_token(4) for index in paged)
    assert long.bytes - short.bytes == 3 * 64 * full
    assert long.bytes_of_sequence(128) - long.bytes_of_sequence(64) == 64 * full


def _scripted(joint: Joint, layout: Any, script: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Logits of one sequence that grows by so many random tokens a step, of which so many are cut again."""
    shape = layout.shape(joint.groups, KVBudget(1, 100, 4, max_query_len=CHUNK))
    space = layout.space(shape)
    joint.attach(EagerAttention(), layout.store(shape, "cpu", torch.float32))
    generator, length, rows = torch.Generator().manual_seed(5), 0, []
    for num_new, cut in script:
        ids = torch.randint(VOCAB, (num_new,), generator=generator).tolist()
        assert space.reserve(0, length + num_new)
        rows.append(joint.forward(pack([PackEntry(0, ids, length)], space, shape, "cpu", all_logits=True)))
        length += num_new - cut
        space.truncate(0, length)
    joint.detach()
    return torch.cat(rows)


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_cutting_drafts_restores_what_the_window_shows(models: dict[str, Any], family: str) -> None:
    joint = joint_of(models, family)
    script = [(6, 0)] * 5 + [(6, 5), (1, 0), (6, 3), (6, 5), (6, 5), (2, 0), (5, 4)] * 3
    expected = _scripted(joint, PagedLayout(2), script)
    assert torch.allclose(_scripted(joint, PoisonedLayout(2, CHUNK), script), expected, rtol=0, atol=1e-5)


def test_windowed_refuses_full_layers(models: dict[str, Any]) -> None:
    joint = joint_of(models, "gemma2")
    with pytest.raises(UserError, match="2 layers of the model have no sliding window"):
        HybridLayout(4, CHUNK, windows_only=True).shape(joint.groups, KVBudget(1, 64, 4))
