"""Copies of whole blocks reach every tensor of a store: all layers, scales and scores, also in large pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.toolkit import pool_store
from infermix_kv.eviction import EvictingLayout, Policy
from infermix_kv.hybrid import HybridLayout, table_bases
from infermix_kv.kv_quantized import QuantizedLayout
from infermix_reference.kv_dense import DenseLayout
from infermix_reference.kv_paged import PagedLayout

GROUPS = (KVGroup((0, 2), 2, 8, 4), KVGroup((1,), 1, 8, 8, shared_values=True))
PLAIN = (KVGroup((0, 2), 2, 8, 4), KVGroup((1,), 1, 8, 8))
LAYOUTS = {
    "paged": (PagedLayout(4), GROUPS),
    "dense": (DenseLayout(), GROUPS),
    "int8": (QuantizedLayout("int8", 4), PLAIN),
    "fp8": (QuantizedLayout("fp8", 4), PLAIN),
    "scored": (EvictingLayout(4, Policy(budget=8, recent=2)), PLAIN),
}
#: Two rows change places, a third is copied from one of them.
PAIRS = [(0, 3), (3, 0), (3, 2)]


def fill(parts: list[torch.Tensor]) -> None:
    for seed, part in enumerate(parts):
        numbers = torch.randint(0, 100, part.shape, generator=torch.Generator().manual_seed(seed))
        part.copy_(numbers.to(part.dtype))


@pytest.mark.parametrize("most", [1, 1 << 28], ids=["layer by layer", "at once"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_is_copied(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_store, "_MOST_COPIED_BYTES", most)
    layout, groups = LAYOUTS[name]
    store: Any = layout.store(layout.shape(groups, KVBudget(4, 16, 4)), "cpu", torch.float32)
    parts = [part for parts in store.parts.values() for part in parts]
    fill(parts)
    before = [part.clone() for part in parts]
    store.copy(PAIRS)
    for part, old in zip(parts, before, strict=True):
        expected = old.clone()
        for source, target in PAIRS:
            expected[target] = old[source]
        assert torch.equal(part, expected)
        assert not torch.equal(part, old)


def test_blocks_of_several_tables_in_bf16() -> None:
    """bf16 does not hold every number above 256, and a block's number is none of what a pool holds."""
    layout = HybridLayout(4, 4)
    shape = layout.shape((KVGroup((0,), 1, 4, 4), KVGroup((1,), 1, 4, 4, window=8)), KVBudget(120, 64, 2))
    store, bases = layout.store(shape, "cpu", torch.bfloat16), table_bases(shape)
    for table, layer in enumerate((0, 1)):
        keys = store.pools(layer).keys
        assert len(keys) > 261
        keys[259] = 7
        store.copy([(bases[table] + 259, bases[table] + 261)])
        assert keys[261].eq(7).all()
        assert keys[260].eq(0).all()
