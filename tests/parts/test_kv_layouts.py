"""Sizes, sharing and refusals of the reference KV layouts; the numbers are worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.errors import OutOfMemory, UserError
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.toolkit.conformance.batches import make_batch
from infermix.toolkit.paged_space import PagedSpace
from infermix_reference.kv_concat import ConcatLayout
from infermix_reference.kv_dense import DenseLayout
from infermix_reference.kv_none import RecomputeLayout
from infermix_reference.kv_paged import PagedLayout

LLAMA_2_13B = (KVGroup(tuple(range(40)), 40, 128, 128),)
SMALL = (KVGroup((0,), 2, 4, 4),)


@pytest.mark.parametrize("layout", [PagedLayout(16), PagedLayout(256), DenseLayout()])
def test_llama_2_13b_bytes(layout: Any) -> None:
    """2 x 40 layers x 40 heads x 128 x 2048 tokens x 2 bytes; the store is built on the meta device."""
    shape = layout.shape(LLAMA_2_13B, KVBudget(max_num_seqs=1, max_model_len=2048, element_bytes=2))
    assert shape.bytes_per_token * 2048 == 1_677_721_600
    assert shape.num_blocks * shape.block_size * shape.bytes_per_token == 1_677_721_600
    assert layout.store(shape, "meta", torch.bfloat16).allocated_bytes() == shape.bytes


def test_64_sequences_of_llama_2_13b() -> None:
    shape = PagedLayout(16).shape(LLAMA_2_13B, KVBudget(64, 2048, 2))
    assert shape.capacity_tokens * shape.bytes_per_token == 64 * 1_677_721_600


def _space(block_size: int, num_seqs: int, length: int) -> PagedSpace:
    layout = PagedLayout(block_size)
    return layout.space(layout.shape(SMALL, KVBudget(num_seqs, length, 4)))


@pytest.mark.parametrize(("tokens", "blocks", "waste"), [(80, 5, 0.0), (81, 6, 0.15625), (1, 1, 0.9375)])
def test_paged_waste_is_the_tail_of_the_last_block(tokens: int, blocks: int, waste: float) -> None:
    space = _space(16, 1, 512)
    assert space.reserve(0, tokens)
    assert len(space.block_table(0)) == blocks
    usage = space.usage()
    assert 1 - usage.used_tokens / usage.allocated_tokens == waste


def test_dense_waste_is_the_rest_of_the_row() -> None:
    layout = DenseLayout()
    space = layout.space(layout.shape(SMALL, KVBudget(1, 512, 4)))
    assert space.reserve(0, 80)
    usage = space.usage()
    assert 1 - usage.used_tokens / usage.allocated_tokens == 0.84375


def test_forks_share_full_blocks() -> None:
    """A prefix of 2,000 tokens in 125 blocks serves 1,000 requests; unshared it would take 125,000."""
    space = _space(16, 2, 2000)
    assert space.reserve(0, 2000)
    for child in range(1, 1000):
        assert space.fork(0, child) == []
    assert space.usage().allocated_tokens == 125 * 16
    for seq_id in range(1000):
        space.release(seq_id)
    assert space.usage().allocated_tokens == 0
    assert space.usage().used_tokens == 0


def test_fork_copies_the_partial_block_only() -> None:
    space = _space(4, 4, 16)
    assert space.reserve(0, 10)
    parent = list(space.block_table(0))
    copies = space.fork(0, 1)
    child = list(space.block_table(1))
    assert copies == [(parent[2], child[2])]
    assert child[:2] == parent[:2]
    assert space.usage().used_tokens == 8 + 2 + 2
    space.release(0)
    assert space.usage().used_tokens == 10


def test_fork_of_a_full_space_changes_nothing() -> None:
    space = _space(4, 1, 16)
    assert space.reserve(0, 14)
    before = space.usage()
    assert space.fork(0, 1) is None
    assert space.usage() == before


def test_cutting_inside_a_shared_block_copies_it_when_the_sequence_grows() -> None:
    space = _space(4, 4, 16)
    assert space.reserve(0, 10)
    space.fork(0, 1)
    shared = list(space.block_table(0))[:2]
    space.truncate(1, 7)
    assert list(space.block_table(1)) == shared
    assert space.take_copies() == []
    assert space.reserve(1, 7)
    assert space.take_copies() == []
    assert space.reserve(1, 8)
    own = space.block_table(1)[1]
    assert own not in space.block_table(0)
    assert space.take_copies() == [(shared[1], own)]
    assert space.take_copies() == []
    space.truncate(1, 4)
    assert list(space.block_table(1)) == shared[:1]


def test_a_cut_block_whose_other_owner_left_is_written_in_place() -> None:
    space = _space(4, 4, 16)
    assert space.reserve(0, 8)
    space.fork(0, 1)
    space.truncate(1, 6)
    space.release(0)
    table = list(space.block_table(1))
    assert space.reserve(1, 8)
    assert list(space.block_table(1)) == table
    assert space.take_copies() == []
    assert space.usage().used_tokens == 8


def test_growing_into_a_shared_block_needs_room_for_the_copy() -> None:
    space = _space(4, 1, 16)
    assert space.reserve(0, 16)
    space.fork(0, 1)
    space.truncate(1, 6)
    before = space.usage()
    assert not space.reserve(1, 7)
    assert (space.usage(), space.take_copies()) == (before, [])
    space.truncate(0, 12)
    assert space.reserve(1, 7)


def test_copies_are_read_before_anything_is_written() -> None:
    """A target that becomes a source stands for its own source; one that is given back is not copied."""
    space = _space(4, 4, 16)
    assert space.reserve(0, 8)
    space.fork(0, 1)
    space.truncate(1, 6)
    assert space.reserve(1, 7)
    first, own = space.block_table(0)[1], space.block_table(1)[1]
    pairs = space.fork(1, 2)
    assert pairs == [(first, own), (first, space.block_table(2)[1])]
    space.truncate(0, 6)
    space.fork(0, 3, 4)
    space.release(1)
    space.truncate(2, 5)
    assert space.fork(2, 4) == [(space.block_table(2)[1], space.block_table(4)[1])]


def test_a_fork_shares_only_what_it_is_told() -> None:
    """The parent has reserved 16 tokens and computed 6: it writes the rest of its second block itself."""
    space = _space(4, 4, 16)
    assert space.reserve(0, 16)
    assert space.fork(0, 1, 6) == [(space.block_table(0)[1], space.block_table(1)[1])]
    assert space.block_table(0)[0] == space.block_table(1)[0]
    assert len(space.block_table(1)) == 2
    assert space.usage().used_tokens == 16 + 2
    assert space.usage().reserved_tokens == 16 + 6


@pytest.mark.parametrize("layout", [PagedLayout(16), DenseLayout(), ConcatLayout()])
def test_too_little_memory_names_what_is_needed(layout: Any) -> None:
    per_token = 2 * 8 * 4
    with pytest.raises(UserError, match="do not hold one sequence of 64 tokens") as caught:
        layout.shape(SMALL, KVBudget(4, 64, 4, max_bytes=per_token * 63))
    needed = int(str(caught.value).rsplit("at least ", 1)[1].split()[0])
    assert layout.shape(SMALL, KVBudget(4, 64, 4, max_bytes=needed)).num_blocks >= 1


def test_memory_cap_takes_sequences_away() -> None:
    full = DenseLayout().shape(SMALL, KVBudget(8, 64, 4))
    half = DenseLayout().shape(SMALL, KVBudget(8, 64, 4, max_bytes=full.bytes // 2))
    assert (full.num_blocks, half.num_blocks) == (8, 3)
    assert half.bytes <= full.bytes // 2


def test_recompute_takes_no_memory() -> None:
    layout = RecomputeLayout()
    shape = layout.shape(SMALL, KVBudget(4, 64, 4, max_bytes=1))
    assert shape.bytes == 0
    assert layout.space(shape).recompute
    store = layout.store(shape, "cpu", torch.float32)
    partial = make_batch([1], [3], [[0]], block_size=64, sink_block=4)
    with pytest.raises(AssertionError, match="whole sequences"):
        store.write(0, torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), partial, partial.groups[0])


def test_lowest_row_is_taken_first() -> None:
    layout = DenseLayout()
    space = layout.space(layout.shape(SMALL, KVBudget(4, 8, 4)))
    for seq_id in range(4):
        assert space.reserve(seq_id, 1)
    space.release(2)
    space.release(0)
    assert space.reserve(7, 1)
    assert list(space.block_table(7)) == [0]


def test_dense_view_is_a_slice_of_the_pool_when_rows_are_in_order() -> None:
    layout = DenseLayout()
    shape = layout.shape(SMALL, KVBudget(4, 8, 4))
    store = layout.store(shape, "cpu", torch.float32)
    ordered = make_batch([1, 1], [3, 2], [[0], [1]], block_size=8, sink_block=4)
    other = make_batch([1, 1], [3, 2], [[2], [0]], block_size=8, sink_block=4)
    view = store.view(0, ordered, ordered.groups[0])
    assert type(view).__name__ == "DenseView"
    assert view.keys.data_ptr() == store.view(0, other, other.groups[0]).sequence(1, 1)[0].data_ptr()


def test_pool_beyond_memory_is_out_of_memory() -> None:
    layout = DenseLayout()
    shape = layout.shape((KVGroup((0,), 64, 4096, 4096),), KVBudget(1024, 2**20, 4))
    with pytest.raises(OutOfMemory, match="bytes of KV"):
        layout.store(shape, "cpu", torch.float32)


def test_layouts_that_serve_prefixes_keep_all_groups_in_one_table() -> None:
    """A hit counts as far as every KV group can serve it: with one table, what one group holds, all hold."""
    serving = []
    for registered in load_catalogue().all(Role.KV):
        component = registered.component
        names = [{}, {"prefix_cache": "hash"}, {"prefix_cache": "radix"}]
        for given in names if "prefix_cache" in component.options.__struct_fields__ else names[:1]:
            layout = component.build(component.options(**given), None)
            groups = (KVGroup((0, 2), 2, 64, 64), KVGroup((1,), 1, 64, 64, window=5))
            try:
                shape = layout.shape(groups, KVBudget(4, 400, 4, max_query_len=11))
            except UserError:  # nothing but windows
                continue
            if hasattr(layout.space(shape), "match"):
                serving.append((component.name, given["prefix_cache"]))
                assert shape.num_tables == 1
    assert serving == [("paged", "hash"), ("paged", "radix")]
