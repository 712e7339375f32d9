"""Lossy layouts under real modeling code: exact while nothing is dropped, and what is dropped is what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.engine.bridge import Joint
from infermix.engine.packing import PackEntry, num_dropped, pack
from infermix.engine.walk import random_sequences
from infermix.roles.attention import LayerSpec
from infermix.roles.batch import Batch
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix_kv.eviction import EvictingLayout, Policy
from infermix_kv.scored_store import chosen_tokens, weights_of
from infermix_kv.sink_window import SinkWindowLayout
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.kv_paged import PagedLayout
from tiny_models import VOCAB, tiny_model

LENGTH = 60
H2O = Policy(budget=12, recent=6, slack=3)
SNAPKV = Policy(budget=12, recent=4, observed_queries=4, pool_kernel=3)


class SinksAndWindow(EagerAttention):
    """What `sink_window` means, over a layout that keeps everything: one sequence, one query at a time."""

    def __init__(self, sinks: int, window: int) -> None:
        self._sinks, self._window = sinks, window

    def forward(self, q: torch.Tensor, view: Any, batch: Batch, layer: LayerSpec) -> torch.Tensor:
        assert batch.host_context_lens is not None
        (context,) = batch.host_context_lens
        keys, values = view.sequence(0, context)
        positions = torch.arange(context)
        seen = (positions < self._sinks) | (positions >= context - self._window)
        group = layer.num_heads // layer.num_kv_heads
        k, v = (part[seen].repeat_interleave(group, 1) for part in (keys, values))
        weights = torch.softmax(torch.einsum("nhd,chd->hnc", q, k) * layer.scale, -1)
        return torch.einsum("hnc,chd->nhd", weights, v)


@pytest.fixture(scope="module")
def joint() -> Joint:
    return Joint(tiny_model("llama"))


def walk(joint: Joint, layout: Any, attention: Any, steps: list[int], keep_all: bool = False) -> torch.Tensor:
    """Logits of one sequence that is computed in steps of so many tokens."""
    (ids,) = random_sequences([sum(steps)], VOCAB, seed=2)
    shape = layout.shape(joint.groups, KVBudget(1, len(ids), 4, max_query_len=max(steps), keep_all=keep_all))
    space = layout.space(shape)
    joint.attach(attention, layout.store(shape, "cpu", torch.float32))
    rows, start = [], 0
    for count in steps:
        assert space.reserve(0, start + count)
        num_dropped(space, 0, start, count)
        if hasattr(space, "evictions"):
            joint.evict(space.evictions())
        rows.append(
            joint.forward(
                pack([PackEntry(0, ids[start : start + count], start)], space, shape, "cpu", all_logits=True)
            )
        )
        start += count
    joint.detach()
    return torch.cat(rows)


@pytest.mark.parametrize(("sinks", "window"), [(0, 5), (3, 1), (4, 16)])
def test_sinks_and_window_are_what_a_mask_of_them_gives(joint: Joint, sinks: int, window: int) -> None:
    """Blocks of one token and steps of one token: exactly these tokens are seen."""
    steps = [1] * LENGTH
    expected = walk(joint, PagedLayout(1), SinksAndWindow(sinks, window), steps)
    seen = walk(joint, SinkWindowLayout(1, sinks, window, 8), EagerAttention(), steps)
    assert torch.allclose(seen, expected, rtol=0, atol=1e-4)
    full = walk(joint, PagedLayout(1), EagerAttention(), steps)
    assert torch.allclose(seen[: sinks + window], full[: sinks + window], rtol=0, atol=1e-4)
    assert (seen - full).abs().max() > 0.1


LAYOUTS = {
    "sink_window": SinkWindowLayout(4, 4, 8, 8),
    "h2o": EvictingLayout(4, H2O),
    "snapkv": EvictingLayout(4, SNAPKV),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_lost_before_anything_is_dropped(joint: Joint, name: str) -> None:
    """The first 12 tokens fit every budget; then logits differ, unless the budget forbids to drop anything."""
    steps = [8, 4, 8, 8, *[1] * 12]
    full = walk(joint, PagedLayout(4), EagerAttention(), steps)
    lossy = walk(joint, LAYOUTS[name], EagerAttention(), steps)
    assert torch.allclose(lossy[:12], full[:12], rtol=0, atol=1e-4)
    assert (lossy - full).abs().max() > 0.1
    kept = walk(joint, LAYOUTS[name], EagerAttention(), steps, keep_all=True)
    assert torch.allclose(kept, full, rtol=0, atol=1e-4)


def test_evicted_logits_are_those_of_the_tokens_that_stay(joint: Joint) -> None:
    """The step after a cut, computed by hand: each head of each layer attends to what the store kept for it."""
    layout, (ids,) = EvictingLayout(4, SNAPKV), random_sequences([31], VOCAB, seed=4)
    full = PagedLayout(4)
    budget = KVBudget(1, 40, 4)
    shape, reference_shape = layout.shape(joint.groups, budget), full.shape(joint.groups, budget)
    space, reference_space = layout.space(shape), full.space(reference_shape)
    store, reference = layout.store(shape, "cpu", torch.float32), full.store(reference_shape, "cpu", torch.float32)
    for kind, each in ((space, store), (reference_space, reference)):
        assert kind.reserve(0, 30)
        joint.attach(EagerAttention(), each)
        joint.forward(pack([PackEntry(0, ids[:30], 0)], kind, shape, "cpu"))
    assert space.reserve(0, 31)
    assert space.place(0, 30, 31) == 18
    before = {layer: reference.pools(layer).keys.flatten(0, 1)[_slots(reference_space, 30)] for layer in joint.layers}
    scores = {layer: store._scores[layer][torch.arange(30)].clone() for layer in joint.layers}
    store.evict(space.evictions())
    for layer in joint.layers:
        kept = chosen_tokens(scores[layer], 12, 4, 3)
        assert kept[-4:].tolist() == [[26] * 2, [27] * 2, [28] * 2, [29] * 2]
        now = store.pools(layer).keys.flatten(0, 1)[_slots(space, 12)]
        assert torch.equal(now, before[layer].gather(0, kept[:, :, None].expand(-1, -1, now.shape[2])))
    assert len(space.block_table(0)) == 4  # 13 tokens, where 31 took 8 blocks
    joint.detach()


def _slots(space: Any, num_tokens: int) -> list[int]:
    table = space.block_table(0)
    return [table[token // 4] * 4 + token % 4 for token in range(num_tokens)]


@pytest.mark.parametrize("window", [None, 3])
def test_scores_are_attention_weights_summed(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = LayerSpec(
        0, 0, 4, 2, 8, 8, scale=0.4, window=window, softcap=2.0, sinks=torch.tensor([0.1, 1.0, -1.0, 0.5])
    )
    keys, q = torch.randn(150, 2, 8, generator=generator), torch.randn(140, 4, 8, generator=generator)
    expected = torch.zeros(2, 150)
    for row in range(140):
        position = 10 + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(4):
            logits = keys[first : position + 1, head // 2] @ q[row, head] * 0.4
            logits = torch.cat((2 * torch.tanh(logits / 2), layer.sinks[head : head + 1]))  # type: ignore[index]
            expected[head // 2, first : position + 1] += torch.softmax(logits, 0)[:-1]
    assert torch.allclose(weights_of(q, keys, layer), expected, rtol=1e-4, atol=1e-5)


def test_the_choice_is_per_head_in_order_and_breaks_ties_to_the_front() -> None:
    scores = torch.tensor([[5.0, 0], [1, 9], [1, 0], [7, 8], [1, 0], [0, 0], [0, 0]])
    assert chosen_tokens(scores, 4, 2, 1).T.tolist() == [[0, 3, 5, 6], [1, 3, 5, 6]]
    assert chosen_tokens(scores, 5, 2, 1).T.tolist() == [[0, 1, 3, 5, 6], [0, 1, 3, 5, 6]]
    assert chosen_tokens(scores, 5, 2, 3).T.tolist() == [[2, 3, 4, 5, 6], [0, 1, 2, 5, 6]]


def test_h2o_keeps_what_every_query_looks_at() -> None:
    """Token 2 of head 1 draws all weight; with it, the sums over all queries decide, not the last ones alone."""
    layout = EvictingLayout(4, Policy(budget=4, recent=2, slack=0))
    from infermix.roles.kv_space import KVGroup
    from infermix.toolkit.conformance.batches import make_batch

    shape = layout.shape((KVGroup((0,), 2, 4, 4),), KVBudget(1, 16, 4))
    space, store = layout.space(shape), layout.store(shape, "cpu", torch.float32)
    layer = LayerSpec(0, 0, 2, 2, 4, 4, scale=1.0)
    keys = torch.zeros(8, 2, 4)
    keys[2, 1], keys[0, 0] = 5.0, 5.0
    assert space.reserve(0, 8)
    for start, stop in ((0, 6), (6, 7), (7, 8)):
        space.place(0, start, stop)
        store.evict(space.evictions())
        cached = space.place(0, start, stop)
        batch = make_batch(
            (stop - start,), (stop - cached,), [list(space.block_table(0))], block_size=4, sink_block=4
        )
        new = keys[start:stop]
        store.write(0, new, new, batch, batch.groups[0])
        store.observe(layer, torch.ones(stop - start, 2, 4), batch, batch.groups[0])
    held = store.pools(0).keys.flatten(0, 1)[_slots(space, 5)]
    assert held[:, 0].sum(-1).tolist() == [20.0, 0, 0, 0, 0]
    assert 20.0 in held[:, 1].sum(-1).tolist()


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_room_for_drafts_is_kept_where_the_window_is_about_to_move(block_size: int) -> None:
    """A step is reserved twice: for the sequence's own token, then for its drafts. It still begins at the former."""
    layout = SinkWindowLayout(block_size, sink_tokens=1, window=5, max_chunk_tokens=4)
    shape = layout.shape((KVGroup((0,), 1, 8, 8, None),), KVBudget(1, 64, 4, max_query_len=4))
    space = layout.space(shape)
    assert space.reserve(0, 4)
    space.place(0, 0, 4)
    for start in range(4, 60):
        assert space.reserve(0, start + 1)
        assert space.reserve(0, start + 4)
        dropped = space.place(0, start, start + 4)
        assert start + 4 - dropped <= len(space.block_table(0)) * block_size <= shape.most_blocks_of(0) * block_size
        space.truncate(0, start + 1)
