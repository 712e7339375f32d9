"""Hand-over of KV between stores: bit for bit through bytes, and a clear refusal where the two sides differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.errors import InfermixError, Unsupported
from infermix.roles.facts import StateTensor
from infermix.roles.kv_space import KVBudget, KVGroup, LayerState
from infermix.toolkit.handover import KVParcel, export_parcel, import_parcel
from infermix_kv.state import StateLayout
from infermix_reference.kv_paged import PagedLayout

GROUPS = (KVGroup((0, 2), 2, 8, 8), KVGroup((1,), 1, 12, 4, window=5))


def side(block_size: int = 4, groups: Any = GROUPS, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """Space, store and shape of one worker, every slot with another number."""
    layout = PagedLayout(block_size)
    shape = layout.shape(groups, KVBudget(3, 40, dtype.itemsize))
    store = layout.store(shape, "cpu", dtype)
    for tensor in store.block_tensors():
        tensor.copy_(torch.randn(tensor.shape))
    return layout.space(shape), store, shape


def test_a_sequence_arrives_in_other_blocks_bit_for_bit() -> None:
    (space, store, shape), (there, other, other_shape) = side(), side()
    assert space.reserve(0, 40)
    assert space.reserve(1, 18)
    assert there.reserve(7, 25)
    assert there.reserve(8, 18)
    mine, yours = list(space.block_table(1)), list(there.block_table(8))
    assert mine != yours
    before = [tensor.clone() for tensor in other.block_tensors()]
    parcel = export_parcel(store, shape, "paged", [mine], 18)
    assert parcel.num_bytes == 5 * 4 * shape.bytes_per_token
    received = KVParcel.from_bytes(parcel.to_bytes())
    assert received.header == parcel.header
    assert received.header.num_tokens == 18
    import_parcel(other, other_shape, "paged", received, [yours])
    rest = [block for block in range(shape.num_blocks + 1) if block not in yours]
    for sent, got, old in zip(store.block_tensors(), other.block_tensors(), before, strict=True):
        assert torch.equal(sent[mine], got[yours])
        assert torch.equal(got[rest], old[rest])


def test_recurrent_states_arrive_as_table_one() -> None:
    """A row of states is one block, its snapshots included."""
    states = (LayerState(0, (StateTensor("conv", (3, 2), None), StateTensor("ssm", (5,), "float32"))),)
    sides = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        layout = StateLayout(4, snapshots=1)
        shape = layout.shape(GROUPS, KVBudget(3, 40, 2, states=states))
        store = layout.store(shape, "cpu", torch.float16)
        for tensor in (*store.block_tensors(0), *store.block_tensors(1)):
            tensor.copy_(torch.randn(tensor.shape))
        space = layout.space(shape)
        assert all(space.reserve(10 * seed + number, 18) for number in range(seed))
        sides.append((space, store, shape))
    (space, store, shape), (there, other, _) = sides
    mine, yours = ([list(s.block_table(seq, table)) for table in (0, 1)] for s, seq in ((space, 10), (there, 21)))
    assert (mine[1][0], yours[1][0]) == (0, 1)
    parcel = export_parcel(store, shape, "state", [mine[0], mine[1][:1]], 18)
    import_parcel(other, shape, "state", KVParcel.from_bytes(parcel.to_bytes()), [yours[0], yours[1][:1]])
    for name in ("conv", "ssm"):
        sent, got = store.states[0][name], other.states[0][name]
        assert torch.equal(sent[list(space.state_slots(10))], got[list(there.state_slots(21))])
        assert not torch.equal(sent[2:4], got[:2])


@pytest.mark.parametrize(
    ("receiver", "layout", "message"),
    [
        ({}, "dense", r'layout "paged" cannot be imported where it is "dense"'),
        ({"block_size": 8}, "paged", "block_size 4 cannot be imported where it is 8"),
        ({"groups": GROUPS[:1]}, "paged", "groups .* cannot be imported"),
        ({"dtype": torch.float16}, "paged", r'tensors .*"float32".* where it is .*"float16"'),
    ],
)
def test_another_kind_of_block_is_refused_before_anything_is_written(
    receiver: dict[str, Any], layout: str, message: str
) -> None:
    _, store, shape = side()
    _, other, other_shape = side(**receiver)
    before = [tensor.clone() for tensor in other.block_tensors()]
    parcel = export_parcel(store, shape, "paged", [[1, 2]], 8)
    with pytest.raises(Unsupported, match=message):
        import_parcel(other, other_shape, layout, parcel, [[1, 2]])
    assert all(torch.equal(old, new) for old, new in zip(before, other.block_tensors(), strict=True))


def test_another_number_of_blocks_is_refused() -> None:
    _, store, shape = side()
    parcel = export_parcel(store, shape, "paged", [[1, 2]], 8)
    with pytest.raises(Unsupported, match=r"\(2,\) blocks per table cannot go into \(3,\)"):
        import_parcel(store, shape, "paged", parcel, [[1, 2, 3]])


def test_a_damaged_parcel_is_refused() -> None:
    _, store, shape = side()
    data = export_parcel(store, shape, "paged", [[1, 2]], 8).to_bytes()
    for broken in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), data.partition(b"\n")[0]):
        with pytest.raises(InfermixError, match="checksum"):
            KVParcel.from_bytes(broken)
    with pytest.raises(InfermixError, match="no KV parcel"):
        KVParcel.from_bytes(b"hello")


def test_an_empty_parcel_is_fine() -> None:
    _, store, shape = side()
    parcel = KVParcel.from_bytes(export_parcel(store, shape, "paged", [[]], 0).to_bytes())
    import_parcel(store, shape, "paged", parcel, [[]])
    assert parcel.num_bytes == 0


def test_a_store_without_block_tensors_is_refused() -> None:
    _, _, shape = side()
    store: Any = object()
    with pytest.raises(Unsupported, match="block_tensors"):
        export_parcel(store, shape, "paged", [[0]], 4)
