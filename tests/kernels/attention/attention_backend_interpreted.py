"""The Triton attention backend under Triton's interpreter, against the conformance checks of its role."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from infermix.errors import Unsupported
from infermix.roles.attention import LayerSpec
from infermix.roles.batch import Batch
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.roles.kv_store import DenseView, PagedView, RaggedView
from infermix.toolkit.conformance import attention as conformance
from infermix.toolkit.conformance.batches import make_batch
from infermix.toolkit.plain_attention import plain_attention
from infermix_kernels.kv_write import write_kv
from infermix_kernels.reference.attention import paged_attention as reference_attention
from infermix_kv.kivi_view import KiviView
from infermix_kv.kv_kivi import KiviLayout
from infermix_kv.kv_quantized import QuantizedLayout
from infermix_triton.attention import TritonAttention
from torch import Tensor

LAYER = LayerSpec(0, 0, 4, 2, 64, 64, scale=0.2, window=30)
QUERY_LENS, CONTEXTS = (1, 3, 40, 2), (20, 3, 60, 2)
BLOCK = 16


def _backend(tmp_path: Path) -> TritonAttention:
    return TritonAttention(tmp_path)


def _pools(num_blocks: int, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(num_blocks, size, 2, 64, generator=generator) for _ in range(2)]


def test_a_mixed_batch_through_blocks_and_dense_rows(tmp_path: Path) -> None:
    """Short queries first, then the rest: two launches whose rows do not touch."""
    backend = _backend(tmp_path)
    q = torch.randn(sum(QUERY_LENS), 8, 64, generator=torch.Generator().manual_seed(1))[:, ::2]
    widths = [-(-context // BLOCK) for context in CONTEXTS]
    tables = [list(range(sum(widths[:row]), sum(widths[: row + 1]))) for row in range(len(widths))]
    keys, values = _pools(sum(widths) + 1, BLOCK)
    batch = make_batch(QUERY_LENS, CONTEXTS, tables, block_size=BLOCK, sink_block=sum(widths))
    group = batch.groups[0]
    out = backend.forward(q, PagedView(keys, values, group.block_tables), batch, LAYER)
    expected = _expected(q, keys, values, batch, group.block_tables)
    assert torch.allclose(out.double(), expected, atol=2e-6)

    keys, values = _pools(len(CONTEXTS), 64)
    out = backend.forward(q, DenseView(keys, values), batch, LAYER)
    assert torch.allclose(out.double(), _expected(q, keys, values, batch, None), atol=2e-6)


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_block_table_that_repeats_a_ring(tmp_path: Path, block_size: int) -> None:
    """What a window sees of contexts many times as long as their rings; memory that nobody wrote is NaN."""
    query_lens, contexts, window = (1, 3, 9), (70, 5, 61), 10
    ring = -(-(window + max(query_lens) - 1) // block_size)
    layer = LayerSpec(0, 0, 4, 2, 64, 64, scale=0.2, window=window)
    tables = [
        [row * ring + column % ring for column in range(-(-context // block_size))]
        for row, context in enumerate(contexts)
    ]
    keys, values = (pool.fill_(float("nan")) for pool in _pools(3 * ring + 1, block_size))
    whole = [_pools(1, context) for context in contexts]
    for table, parts in zip(tables, whole, strict=True):
        for token in range(parts[0].shape[1]):  # in order: later tokens overwrite those that left the window
            for pool, part in zip((keys, values), parts, strict=True):
                pool[table[token // block_size], token % block_size] = part[0, token]
    q = torch.randn(sum(query_lens), 4, 64, generator=torch.Generator().manual_seed(1))
    batch = make_batch(query_lens, contexts, tables, block_size=block_size, sink_block=3 * ring)
    out = _backend(tmp_path).forward(q, PagedView(keys, values, batch.groups[0].block_tables), batch, layer)
    expected = [
        plain_attention(rows, parts[0][0], parts[1][0], layer)
        for rows, parts in zip(q.split(query_lens), whole, strict=True)
    ]
    assert torch.allclose(out.double(), torch.cat(expected), atol=2e-6)


def _expected(q: Tensor, keys: Tensor, values: Tensor, batch: object, tables: Tensor | None) -> Tensor:
    return reference_attention(
        q.double(),
        keys,
        values,
        cu_seqlens_q=batch.cu_seqlens_q,  # type: ignore[attr-defined]
        context_lens=batch.context_lens,  # type: ignore[attr-defined]
        block_tables=tables,
        scale=LAYER.scale,
        window=LAYER.window,
    )


def test_ragged_views_are_refused(tmp_path: Path) -> None:
    batch = make_batch((1,), (4,), [[0]], block_size=16, sink_block=1)
    view = RaggedView([torch.zeros(4, 2, 64)], [torch.zeros(4, 2, 64)])
    with pytest.raises(Unsupported, match="paged and dense"):
        _backend(tmp_path).forward(torch.zeros(1, 4, 64), view, batch, LAYER)


def test_the_debug_switch_reaches_the_tables(tmp_path: Path) -> None:
    batch = make_batch((1,), (4,), [[0]], block_size=16, sink_block=1)
    keys, values = _pools(2, 16)
    tables = torch.tensor([[7]], dtype=torch.int32)
    backend = TritonAttention(tmp_path, check_block_tables=True)
    with pytest.raises(ValueError, match="block_tables"):
        backend.forward(torch.zeros(1, 4, 64), PagedView(keys, values, tables), batch, LAYER)


@pytest.mark.parametrize("lens", [((1, 3, 40, 2), (20, 3, 60, 2)), ((1, 1, 2), (7, 30, 2))], ids=["long", "short"])
def test_a_captured_mixed_step(tmp_path: Path, lens: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Lengths that only the device knows: the kernel for long queries, and the one that splits contexts."""
    case = conformance.draw_case(LAYER, *lens, torch.Generator().manual_seed(2), "cpu", torch.float32)
    conformance._check_mixed(_backend(tmp_path), case, BLOCK)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_quantized_cache_is_written_and_read_in_place(tmp_path: Path, dtype: str) -> None:
    """The short cut past `write` leaves the same bytes, and the backend reads what the gather gives back.

    The interpreter converts to fp8 without carrying into the exponent, so that only a device can compare those bytes.
    """
    layout = QuantizedLayout(dtype, BLOCK)
    shape = layout.shape((KVGroup((0,), 2, 64, 64),), KVBudget(4, 64, 4))
    widths = [-(-context // BLOCK) for context in CONTEXTS]
    tables = [list(range(sum(widths[:row]), sum(widths[: row + 1]))) for row in range(len(widths))]
    batch = make_batch(CONTEXTS, CONTEXTS, tables, block_size=BLOCK, sink_block=shape.sink_block)
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(sum(CONTEXTS), 2, 64, generator=generator) for _ in range(2))
    plain, direct = (layout.store(shape, "cpu", torch.float32) for _ in range(2))
    plain.write(0, k, v, batch, batch.groups[0])
    pools = direct.pools(0)
    write_kv(
        k, v, pools.keys, pools.values, batch.groups[0].slot_mapping,
        key_scales=pools.key_scales, value_scales=pools.value_scales,
    )  # fmt: skip
    first = 0 if dtype == "int8" else 2
    for left, right in zip(plain.parts[0][first:], direct.parts[0][first:], strict=True):
        assert torch.allclose(left.float(), right.float(), rtol=1e-6)

    batch = make_batch(QUERY_LENS, CONTEXTS, tables, block_size=BLOCK, sink_block=shape.sink_block)
    q = torch.randn(sum(QUERY_LENS), 4, 64, generator=generator)
    view = plain.view(0, batch, batch.groups[0])
    out = _backend(tmp_path).forward(q, view, batch, LAYER).split(QUERY_LENS)
    for index, (part, rows) in enumerate(zip(out, q.split(QUERY_LENS), strict=True)):
        expected = plain_attention(rows, *view.sequence(index, CONTEXTS[index]), LAYER)
        assert torch.allclose(part.double(), expected, atol=1e-5)


@pytest.mark.parametrize(("bits", "group", "gathers"), [(4, 16, 0), (2, 16, 0), (4, 4, 1)], ids=str)
def test_groups_are_read_in_place_where_they_are_whole_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, group: int, gathers: int
) -> None:
    calls: list[int] = []
    gather = KiviView.batched
    monkeypatch.setattr(KiviView, "batched", lambda view, *given: (calls.append(1), gather(view, *given))[1])
    layout = KiviLayout(bits, group, 2 * group, BLOCK)
    shape = layout.shape((KVGroup((0,), 2, 64, 64),), KVBudget(4, 64, 4))
    space, store = layout.space(shape), layout.store(shape, "cpu", torch.float32)
    for seq, context in enumerate(CONTEXTS):
        assert space.reserve(seq, context)
    both = [[list(space.block_table(seq, table)) for seq in range(len(CONTEXTS))] for table in (0, 1)]

    def batch_of(queries: tuple[int, ...]) -> Batch:
        made = [make_batch(queries, CONTEXTS, tables, block_size=BLOCK, sink_block=4) for tables in both]
        return replace(made[0], tables=tuple(each.groups[0] for each in made))

    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(sum(CONTEXTS), 2, 64, generator=generator) for _ in range(2))
    batch = batch_of(CONTEXTS)
    store.write(0, k, v, batch, batch.groups[0])
    batch = batch_of(QUERY_LENS)
    q = torch.randn(sum(QUERY_LENS), 4, 64, generator=generator)
    view = store.view(0, batch, batch.groups[0])
    out = _backend(tmp_path).forward(q, view, batch, LAYER).split(QUERY_LENS)
    for index, (part, rows) in enumerate(zip(out, q.split(QUERY_LENS), strict=True)):
        expected = plain_attention(rows, *view.sequence(index, CONTEXTS[index]), LAYER)
        assert torch.allclose(part.double(), expected, atol=1e-5)
    assert len(calls) == gathers
