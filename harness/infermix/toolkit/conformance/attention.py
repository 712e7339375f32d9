"""Conformance of attention backends: every view, shape and feature against attention in fp64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from infermix.errors import Unsupported
from infermix.roles.attention import AttentionBackend, LayerSpec
from infermix.roles.batch import Batch
from infermix.roles.component import Component, meets
from infermix.roles.kv_store import DenseView, PagedView, QuantizedPagedView, RaggedView, View
from infermix.toolkit.conformance.batches import make_batch
from infermix.toolkit.conformance.component import DTYPES, example_model, machine_for, usable_dtype
from infermix.toolkit.plain_attention import plain_attention

#: (query lengths, context lengths): decode, verification, prefill, chunks, and a mix of them.
LENGTHS = (
    ((1,), (1,)),
    ((1,), (33,)),
    ((1, 1, 1), (17, 2, 40)),
    ((1, 1), (12, 12)),
    ((3, 3), (9, 31)),
    ((7,), (7,)),
    ((5, 5), (5, 5)),
    ((1, 1, 6, 4, 19), (40, 3, 6, 21, 19)),
)

#: (query heads, KV heads): MHA, two groupings, MQA.
HEADS = ((4, 4), (4, 2), (6, 2), (5, 1))


@dataclass(frozen=True)
class AttentionCase:
    """One call: K and V per sequence (`[c, Hkv, D]`), the new queries `[T, H, Dk]`, and what the layer asks for."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    layer: LayerSpec
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def capacity(self) -> int:
        return max(self.context_lens) + 5


def check_attention(
    component: Component,
    options: Any = None,
    *,
    block_sizes: Sequence[int] = (16,),
    seed: int = 0,
    share: tuple[int, int] = (0, 1),
) -> int:
    """Build the backend and compare it with fp64 attention; returns the number of comparisons.

    Runs on CUDA where there is one and the backend takes it. Memory that no sequence wrote is NaN; padded rows must
    be zeros; what is not provided must raise `Unsupported`; a batch that is updated in place must be read afresh.
    `share` (index, of how many) takes part of the kinds of layers alone, so that processes can share the compilation
    of kernels; tree masks are checked by the first.
    """
    options = component.options() if options is None else options
    machine = machine_for(component, options)
    needs = component.needs(options, example_model(), machine)
    provided = component.provides(options, example_model(), machine)
    backend: AttentionBackend = component.build(options, None)
    dtype = DTYPES[usable_dtype(needs) or "float32"]
    generator = torch.Generator().manual_seed(seed)
    count = 0
    for layer in islice(layers_of(provided), share[0], None, share[1]):
        for query_lens, context_lens in LENGTHS:
            case = draw_case(layer, query_lens, context_lens, generator, machine.device, dtype)
            for view_name, block_size in views_of(needs, block_sizes):
                check_case(backend, case, view_name, block_size, capture="graph:no" not in provided)
                if "graph:mixed" in provided and view_name == "paged":
                    _check_mixed(backend, case, block_size)
                count += 1
    if "attn:tree_mask" in provided and share[0] == 0:
        from infermix.toolkit.conformance.attention_tree import check_trees

        count += check_trees(backend, needs, provided, machine.device, dtype, generator)
    _check_refusals(backend, provided, machine.device, dtype, generator)
    return count


def check_case(backend: AttentionBackend, case: Any, view_name: str, block_size: int, *, capture: bool) -> None:
    """One case through one kind of view; uniform ones as a captured batch with padded rows, too."""
    label = (
        f"{type(backend).__name__}, {view_name} view, block size {block_size}, queries {case.query_lens}, "
        f"contexts {case.context_lens}, {case.layer}"
    )
    if view_name == "quantized":
        case = replace(case, keys=list(map(_rounded, case.keys)), values=list(map(_rounded, case.values)))
    expected = reference_attention(case)
    view, batch = pack_case(case, view_name, block_size, captured=False)
    compare(backend.forward(case.q, view, batch, case.layer), expected, label, slack_of(view_name, case.q.dtype))
    if capture and len(set(case.query_lens)) == 1 and view_name != "ragged":
        _check_captured(backend, case, view_name, block_size, expected, label)


def reference_attention(case: Any) -> Tensor:
    """`[T, H, Dv]` in fp64, one sequence and head at a time."""
    pieces, start = [], 0
    for query_len, keys, values in zip(case.query_lens, case.keys, case.values, strict=True):
        pieces.append(plain_attention(case.q[start : start + query_len], keys, values, case.layer))
        start += query_len
    return torch.cat(pieces)


def tolerance(dtype: torch.dtype) -> float:
    """Absolute error for values of size 1: a few roundings of the output and of the weights."""
    return torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 4)


def slack_of(view_name: str, dtype: torch.dtype) -> float:
    """Integer keys may be multiplied with a bias on them that is taken off the scores.

    The Triton kernels keep int8 as 1152 + value; nine times the size of a value is nine times the rounding.
    """
    return 9.0 if view_name == "quantized" and dtype == torch.float32 else 1.0


def compare(out: Tensor, expected: Tensor, label: str, slack: float = 1.0) -> None:
    assert out.shape == expected.shape, f"{label}: shape {tuple(out.shape)}, expected {tuple(expected.shape)}"
    assert not out.isnan().any(), f"{label}: NaN in the output"
    error = (out.double() - expected).abs().max().item()
    limit = slack * tolerance(out.dtype) * max(1.0, expected.abs().max().item())
    assert error <= limit, f"{label}: off by {error:.3g}, allowed {limit:.3g}"


def layers_of(provided: frozenset[str]) -> Iterator[LayerSpec]:
    dims = [(dim, dim) for dim in (64, 80, 128) if meets(f"head_dim:{dim}", provided)]
    if "head_dim:*" in provided:
        dims += [(24, 16)]
    for heads, kv_heads in HEADS:
        yield LayerSpec(0, 0, heads, kv_heads, *dims[heads % len(dims)], scale=0.2)
    plain = LayerSpec(0, 0, 4, 2, *dims[0], scale=0.15)
    if "attn:sliding_window" in provided:
        yield from (replace(plain, window=window) for window in (1, 4, 100))
    if "attn:softcap" in provided:
        yield replace(plain, softcap=2.0)
    if "attn:sinks" in provided:
        yield replace(plain, sinks=torch.linspace(-1, 2, 4))
    if "attn:noncausal" in provided:
        yield replace(plain, causal=False)
        if "attn:sinks" in provided:
            yield replace(plain, causal=False, sinks=torch.linspace(-1, 2, 4))
    if {"attn:sliding_window", "attn:softcap", "attn:sinks"} <= provided:
        yield replace(plain, window=6, softcap=3.0, sinks=torch.linspace(0, 1, 4))


def views_of(needs: frozenset[str], block_sizes: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Every view that `needs` accepts; a backend that reads dense ones reads paged ones through the gather."""
    accepted = {name for need in needs if need.startswith("view:") for name in need.split("|")}
    if "view:ragged" in accepted:
        yield "ragged", 1
    if "view:dense" in accepted:
        yield "dense", 1
    if accepted & {"view:paged", "view:dense"}:
        yield from (("paged", size) for size in block_sizes)
    if accepted & {"view:quantized", "view:dense"}:
        yield from (("quantized", size) for size in block_sizes)


def draw_case(
    layer: LayerSpec,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    generator: torch.Generator,
    device: str,
    dtype: torch.dtype,
) -> AttentionCase:
    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    if layer.sinks is not None:
        layer = replace(layer, sinks=layer.sinks.to(device, dtype))
    return AttentionCase(
        query_lens,
        context_lens,
        layer,
        normal(sum(query_lens), layer.num_heads, layer.key_dim),
        [normal(context, layer.num_kv_heads, layer.key_dim) for context in context_lens],
        [normal(context, layer.num_kv_heads, layer.value_dim) for context in context_lens],
    )


def pack_case(
    case: AttentionCase, view_name: str, block_size: int, captured: bool, padding: int = 0
) -> tuple[View, Batch]:
    """The view, NaN wherever nothing was written, and its batch with `padding` empty rows behind."""
    capacity = case.capacity
    paged = view_name in ("paged", "quantized")
    size = block_size if paged else capacity
    width = -(-capacity // size)
    rows = len(case.query_lens) + padding
    tables = _tables(rows, width) if paged else [[row] for row in range(rows)]
    used = [table[: -(-context // size)] for table, context in zip(tables, case.context_lens, strict=False)]
    batch = make_batch(
        (*case.query_lens, *[case.query_lens[0]] * padding),
        (*case.context_lens, *[0] * padding),
        [*used, *[[]] * padding],
        block_size=size,
        sink_block=rows * width,
        width=width,
        captured=captured,
        capacity=capacity,
        device=str(case.q.device),
    )
    if view_name == "ragged":
        return RaggedView(list(case.keys), list(case.values)), batch
    if view_name == "quantized":
        quantized = [_fill_quantized(parts, tables, size, rows * width + 1) for parts in (case.keys, case.values)]
        (keys, key_scales), (values, value_scales) = quantized
        tables_of = batch.groups[0].block_tables
        return QuantizedPagedView(keys, values, key_scales, value_scales, tables_of, case.q.dtype), batch
    pools = [_fill(parts, tables, size, rows * width + 1) for parts in (case.keys, case.values)]
    if view_name == "dense":
        return DenseView(pools[0][:rows], pools[1][:rows]), batch
    return PagedView(pools[0], pools[1], batch.groups[0].block_tables), batch


def _tables(rows: int, width: int) -> list[list[int]]:
    blocks = torch.randperm(rows * width, generator=torch.Generator().manual_seed(rows)).view(rows, width)
    return blocks.tolist()


def _fill(parts: list[Tensor], tables: list[list[int]], block_size: int, num_blocks: int) -> Tensor:
    pool = parts[0].new_full((num_blocks, block_size, *parts[0].shape[1:]), float("nan"))
    for part, table in zip(parts, tables, strict=False):
        for index, piece in enumerate(part.split(block_size)):
            pool[table[index], : piece.shape[0]] = piece
    return pool


def _quantized(part: Tensor) -> tuple[Tensor, Tensor]:
    """`[c, Hkv, D]` -> int8 and scales `[c, Hkv]`."""
    scales = part.float().abs().amax(-1) / 127
    return (part / scales[..., None]).round().to(torch.int8), scales


def _rounded(part: Tensor) -> Tensor:
    """What is left of keys or values in int8, in fp32."""
    numbers, scales = _quantized(part)
    return numbers * scales[..., None]


def _fill_quantized(
    parts: list[Tensor], tables: list[list[int]], block_size: int, num_blocks: int
) -> tuple[Tensor, Tensor]:
    """A pool of int8 and its scales `[num_blocks, Hkv, block_size]`, NaN where nothing was written."""
    quantized = [_quantized(part) for part in parts]
    scales = _fill([scale for _, scale in quantized], tables, block_size, num_blocks)
    pool = _fill([numbers.float() for numbers, _ in quantized], tables, block_size, num_blocks)
    return pool.nan_to_num(99).to(torch.int8), scales.transpose(1, 2).contiguous()


def _check_captured(
    backend: AttentionBackend, case: AttentionCase, view_name: str, block_size: int, expected: Tensor, label: str
) -> None:
    """The same sequences with two padded rows; first at contexts of 1, then updated in place, as a replay does."""
    query_len = case.query_lens[0]
    view, batch = pack_case(case, view_name, block_size, captured=True, padding=2)
    q = torch.cat((case.q, case.q.new_full((2 * query_len, *case.q.shape[1:]), float("nan"))))
    contexts = batch.context_lens.clone()
    batch.context_lens.copy_(contexts.clamp(max=query_len))
    out, replay = record_step(backend, q, view, batch, case.layer)
    batch.context_lens.copy_(contexts)
    out = replay() if replay is not None else out
    compare(out[: len(case.q)], expected, f"captured, {label}", slack_of(view_name, out.dtype))
    assert (out[len(case.q) :] == 0).all(), f"captured, {label}: padded rows are not zero"


def _check_mixed(backend: AttentionBackend, case: AttentionCase, block_size: int) -> None:
    """Any query lengths in a captured batch: padding tokens belong to a row of context 0, one more row is empty.

    First every context is as short as its queries, then the batch is updated in place, as a replay does.
    """
    label = f"captured mixed step, queries {case.query_lens}, contexts {case.context_lens}, {case.layer}"
    view, batch = pack_case(case, "paged", block_size, captured=False, padding=2)
    assert isinstance(view, PagedView)
    tokens, padded = len(case.q), len(case.q) + 5
    lens = torch.tensor([0, *case.query_lens, 5, 0], device=case.q.device)
    batch.cu_seqlens_q = lens.cumsum(0).to(torch.int32)
    batch.query_lens, batch.query_len = (padded,) * (len(case.query_lens) + 2), None
    batch.host_context_lens = batch.host_rows = None
    batch.context_capacity = case.capacity
    q = torch.cat((case.q, case.q.new_full((5, *case.q.shape[1:]), float("nan"))))
    contexts = batch.context_lens.clone()
    batch.context_lens.copy_(torch.minimum(contexts, lens[1:].to(torch.int32)))
    out, replay = record_step(backend, q, view, batch, case.layer)
    batch.context_lens.copy_(contexts)
    out = replay()
    compare(out[:tokens], reference_attention(case), label)
    assert (out[tokens:] == 0).all(), f"{label}: padding tokens are not zero"


def record_step(
    backend: AttentionBackend, q: Tensor, view: View, batch: Batch, layer: LayerSpec
) -> tuple[Tensor, Any]:
    """The output and a function that runs the step again: a CUDA graph where there is a device, else a plain call."""
    out = backend.forward(q, view, batch, layer)
    if q.device.type != "cuda":
        return out, lambda: backend.forward(q, view, batch, layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(q, view, batch, layer)

    def replay() -> Tensor:
        graph.replay()
        return out

    return out, replay


def _check_refusals(
    backend: AttentionBackend,
    provided: frozenset[str],
    device: str,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    plain = next(layers_of(provided))
    asked = {
        "attn:sliding_window": replace(plain, window=4),
        "attn:softcap": replace(plain, softcap=2.0),
        "attn:sinks": replace(plain, sinks=torch.zeros(plain.num_heads)),
        "attn:noncausal": replace(plain, causal=False),
    }
    for feature, layer in asked.items():
        if feature in provided:
            continue
        case = draw_case(layer, (1, 1), (9, 6), generator, device, dtype)
        view, batch = pack_case(case, "dense", 1, captured=False)
        try:
            backend.forward(case.q, view, batch, case.layer)
        except Unsupported:
            continue
        raise AssertionError(f"{type(backend).__name__} does not provide {feature} and ignores it")
