"""The block pool against plain counting."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infermix.toolkit.block_pool import BlockPool

ACTIONS = st.lists(st.tuples(st.sampled_from(["allocate", "incref", "release"]), st.integers(0, 9)), max_size=80)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 12), actions=ACTIONS)
def test_no_leak_no_double_free(size: int, actions: list[tuple[str, int]]) -> None:
    pool, owners = BlockPool(size), Counter[int]()
    for action, number in actions:
        held = sorted(owners.elements())
        if action == "allocate":
            blocks = pool.allocate(number)
            assert (blocks is None) == (number > size - len(owners))
            assert not set(blocks or ()) & set(owners), "a block in use was handed out again"
            owners.update(blocks or ())
        elif held:
            block = held[number % len(held)]
            if action == "incref":
                pool.incref([block])
                owners[block] += 1
            else:
                freed = pool.release([block])
                owners[block] -= 1
                assert freed == ([] if owners[block] else [block])
                owners += Counter()
        assert pool.num_used == len(owners)
        assert pool.num_free == size - len(owners)
        assert all(pool.references(block) == owners[block] for block in range(size))
    pool.release(list(owners.elements()))
    assert pool.num_free == size


def test_a_free_block_is_not_released_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="already free"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="is free"):
        pool.incref(blocks)
