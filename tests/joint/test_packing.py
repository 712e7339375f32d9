"""Packing: addresses, positions and rows of a mixed batch."""

from __future__ import annotations

import pytest
from infermix.engine.packing import PackEntry, pack
from infermix.roles.kv_space import KVGroup, KVShape

GROUPS = (KVGroup((0, 1), 2, 8, 8), KVGroup((2,), 2, 8, 8, window=4))


class TwoTables:
    """Two sequences with blocks of four tokens; the second table is the first one reversed."""

    blocks = {7: [3, 0, 5], 9: [1]}

    def block_table(self, seq_id: int, table: int = 0) -> list[int]:
        return self.blocks[seq_id][::-1] if table else self.blocks[seq_id]


def shape(tables: tuple[int, ...] = ()) -> KVShape:
    return KVShape(GROUPS, 6, 4, 2, 12, 0, 0.0, tables)


ENTRIES = [PackEntry(7, [70, 71, 72], 6), PackEntry(9, [90], 0)]


def test_fields_of_a_mixed_batch() -> None:
    batch = pack(ENTRIES, TwoTables(), shape(), "cpu")  # type: ignore[arg-type]
    assert batch.input_ids.tolist() == [70, 71, 72, 90]
    assert batch.positions.tolist() == [6, 7, 8, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.context_lens.tolist() == [9, 1]
    assert batch.logits_rows.tolist() == [2, 3]
    assert (batch.query_lens, batch.host_context_lens, batch.host_rows) == ((3, 1), (9, 1), (3, 1))
    assert (batch.query_len, batch.context_capacity) == (None, 9)


def test_addresses() -> None:
    batch = pack(ENTRIES, TwoTables(), shape(), "cpu")  # type: ignore[arg-type]
    first, second = batch.groups
    assert first is second
    assert first.slot_mapping.tolist() == [0 * 4 + 2, 0 * 4 + 3, 5 * 4 + 0, 1 * 4 + 0]
    sink = shape().sink_block
    assert first.block_tables.tolist() == [[3, 0, 5], [1, sink, sink]]


def test_groups_with_tables_of_their_own() -> None:
    batch = pack(ENTRIES, TwoTables(), shape((1, 0)), "cpu")  # type: ignore[arg-type]
    assert batch.groups[0].block_tables[0].tolist() == [5, 0, 3]
    assert batch.groups[1].block_tables[0].tolist() == [3, 0, 5]


@pytest.mark.parametrize(
    ("asked", "rows"), [({"all_logits": True}, [0, 1, 2, 3]), ({"logits_rows": [1]}, [1]), ({"logits_rows": []}, [])]
)
def test_rows(asked: dict, rows: list[int]) -> None:
    batch = pack(ENTRIES, TwoTables(), shape(), "cpu", **asked)  # type: ignore[arg-type]
    assert batch.logits_rows.tolist() == rows


def test_types_and_alignment() -> None:
    import torch

    batch = pack(ENTRIES, TwoTables(), shape(), "cpu")  # type: ignore[arg-type]
    assert batch.query_lens != (batch.query_len,)
    for tensor in (batch.input_ids, batch.positions, batch.logits_rows, batch.groups[0].slot_mapping):
        assert tensor.dtype is torch.int64
        assert tensor.data_ptr() % 16 == 0
    for tensor in (batch.cu_seqlens_q, batch.context_lens, batch.groups[0].block_tables):
        assert tensor.dtype is torch.int32
        assert tensor.data_ptr() % 16 == 0


def test_equal_query_lengths_are_noticed() -> None:
    entries = [PackEntry(7, [1], 6), PackEntry(9, [2], 1)]
    assert pack(entries, TwoTables(), shape(), "cpu").query_len == 1  # type: ignore[arg-type]
