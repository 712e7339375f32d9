"""Rings of blocks: tables, sharing of memory between tables, cuts, counters; the numbers are worked by hand."""

from __future__ import annotations

import pytest
from infermix.errors import Unsupported, UserError
from infermix.roles.kv_space import KVBudget, KVGroup, KVShape
from infermix_kv.hybrid import HybridLayout, HybridSpace, table_bases
from infermix_kv.ring_space import RingSpace, ring_blocks

#: Gemma3's pattern: five local layers with a window of 512, one full layer.
GEMMA3 = (KVGroup((0, 1, 2, 3, 4), 1, 256, 256, window=512), KVGroup((5,), 1, 256, 256))
#: A window of 6 and chunks of 3 need 8 slots: two blocks of 4.
RING, FULL = KVGroup((0,), 1, 8, 8, window=6), KVGroup((1,), 1, 8, 8)


def ring(num_blocks: int = 6) -> RingSpace:
    return RingSpace(num_blocks, block_size=4, num_ring=2, window=6, max_model_len=100)


def hybrid(num_seqs: int = 2, length: int = 40, max_bytes: int | None = None) -> tuple[KVShape, HybridSpace]:
    layout = HybridLayout(4, 3)
    shape = layout.shape((RING, FULL), KVBudget(num_seqs, length, 4, max_bytes))
    return shape, layout.space(shape)


@pytest.mark.parametrize(
    ("window", "query", "size", "blocks"), [(6, 3, 4, 2), (6, 4, 4, 3), (1, 1, 16, 1), (512, 512, 16, 64)]
)
def test_ring_holds_the_window_of_the_first_new_token(window: int, query: int, size: int, blocks: int) -> None:
    assert ring_blocks(window, query, size) == blocks


def test_the_table_repeats_the_ring() -> None:
    space = ring()
    assert space.reserve(0, 3)
    assert space.reserve(0, 19)
    first, second = space.block_table(0)[:2]
    assert list(space.block_table(0)) == [first, second, first, second, first]
    assert space.usage().allocated_tokens == space.usage().used_tokens == 8
    space.release(0)
    assert space.usage().allocated_tokens == space.usage().used_tokens == 0


def test_cuts_go_as_far_as_the_window_is_held() -> None:
    space = ring()
    assert space.reserve(0, 20)
    space.wrote(0, 20)  # holds tokens 12 to 19
    space.truncate(0, 17)  # token 17 sees 12 to 16
    with pytest.raises(Unsupported, match="begins before token 12"):
        space.truncate(0, 16)
    assert len(space.block_table(0)) == 5


def test_a_reservation_alone_overwrites_nothing() -> None:
    space = ring()
    assert space.reserve(0, 20)
    space.wrote(0, 7)
    space.truncate(0, 1)
    assert space.usage().allocated_tokens == 4


def test_forks_copy_the_ring() -> None:
    space = ring()
    assert space.reserve(0, 10)
    copies = space.fork(0, 1)
    assert copies == list(zip(space.block_table(0)[:2], space.block_table(1)[:2], strict=True))
    assert space.reserve(2, 5)
    assert space.fork(0, 3) is None


def test_gemma3_bytes() -> None:
    """131,072 tokens: 5 layers x 64 blocks x 16 tokens, 1 layer x 8,192 blocks; 1,024 bytes a token and layer."""
    shape = HybridLayout(16, 513).shape(GEMMA3, KVBudget(1, 131_072, 2))
    assert shape.table_limits == (None, 64)
    assert shape.group_tables == (1, 0)
    assert shape.bytes == (5 * (64 + 1) + (8192 + 1)) * 16 * 1024
    assert shape.bytes_of_sequence(131_072) == (5 * 64 + 8192) * 16 * 1024
    assert shape.bytes_of_sequence(2048) - shape.bytes_of_sequence(1024) == 1024 * 1024


def test_a_ring_longer_than_the_sequences_is_paged() -> None:
    shape = HybridLayout(16, 512).shape(GEMMA3, KVBudget(4, 1000, 2))
    assert shape.group_tables == (0, 0)
    assert shape.max_query_len is None


def test_a_reservation_holds_in_all_tables_or_in_none() -> None:
    shape, space = hybrid(num_seqs=1)
    assert shape.table_blocks == (10, 2)
    assert space.reserve(0, 5)  # the ring is full now, the paged pool is not
    before = space.usage()
    assert not space.reserve(1, 1)
    assert space.usage() == before
    assert space.reserve(0, 40)
    assert space.usage().allocated_tokens == 40 + 8


def test_memory_is_divided_so_that_rings_take_what_they_can_use() -> None:
    block = 4 * 16 * 4
    shape, space = hybrid(num_seqs=8, max_bytes=(15 + 1) * block + (15 + 1) * block)
    assert shape.table_blocks == (15, 15)
    assert space.fits(40)
    shape, _ = hybrid(num_seqs=2, max_bytes=(15 + 1) * block + (4 + 1) * block)
    assert shape.table_blocks == (15, 4)
    with pytest.raises(UserError, match="at least"):
        hybrid(num_seqs=2, max_bytes=9 * block)
    shape, _ = hybrid(num_seqs=8, max_bytes=(10 + 1) * block + (5 + 1) * block)
    assert shape.table_blocks == (11, 4)  # rings for two of the eight sequences


def test_fork_numbers_the_blocks_of_all_pools_through() -> None:
    shape, space = hybrid()
    assert table_bases(shape) == [0, 21]
    assert space.reserve(0, 10)
    pairs = space.fork(0, 1)
    assert pairs is not None
    paged = [pair for pair in pairs if pair[0] <= 20]
    assert paged == [(space.block_table(0)[2], space.block_table(1)[2])]
    assert [source - 21 for source, _ in pairs if source > 20] == list(space.block_table(0, 1)[:2])


def test_counters_say_what_rings_overwrote() -> None:
    _, space = hybrid()
    assert space.reserve(0, 20)
    space.place(0, 0, 20)
    space.release(0)
    assert space.counters() == {"kv_stored_slots": 40.0, "kv_overwritten_slots": 12.0}
    space.reset_counters()
    assert not any(space.counters().values())
