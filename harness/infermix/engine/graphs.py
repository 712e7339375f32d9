"""Steps of uniform query length replayed from CUDA graphs.

A graph is keyed by (batch, query length, context bucket): decode has query length 1, verification 1 + drafts. All
metadata of a step lives in one pinned host buffer and one device buffer, both carved into the tensors of a `Batch`; a
step costs one copy and one replay. Padded rows belong to the sink lane, have context length 0 and write to the sink
block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from infermix.engine.packing import PackEntry, arrange, sink_blocks
from infermix.engine.stages import FieldSpec, StagedFields
from infermix.roles.batch import Batch, GroupBatch
from infermix.toolkit.sampling import TorchSelector

if TYPE_CHECKING:
    from torch import Tensor

    from infermix.engine.bridge import Joint
    from infermix.roles.kv_space import KVShape, KVSpace
    from infermix.roles.scheduler import Scheduled
    from infermix.toolkit.selection import TokenSelector

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class GraphKey:
    batch: int
    query_len: int
    context: int


def batch_buckets(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64, then steps of 32: waste stays under a third."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs + 32, 32)]
    return sorted({min(size, max_num_seqs) for size in sizes})


def context_buckets(max_model_len: int) -> list[int]:
    """Powers of two from 256 up to `max_model_len`, which is the last one."""
    sizes, size = [], 256
    while size < max_model_len:
        sizes.append(size)
        size *= 2
    return [*sizes, max_model_len]


def _fields(batch: int, query_len: int, tables: int, width: int, trees: bool) -> list[FieldSpec]:
    tokens = batch * query_len
    mask: list[FieldSpec] = [("tree_mask", np.int64, (tokens,))] if trees else []
    return [
        *mask,
        ("host_ids", np.int64, (tokens,)),
        ("positions", np.int64, (tokens,)),
        ("slots", np.int64, (tables, tokens)),
        ("lanes", np.int64, (batch,)),
        ("context_lens", np.int32, (batch,)),
        ("tables", np.int32, (tables, batch, width)),
    ]


class StepBuffers:
    """Host stages and device tensors of one (batch, query length): filled in place, copied in one piece."""

    def __init__(
        self, batch: int, query_len: int, shape: KVShape, sink_lane: int, device: torch.device, trees: bool = False
    ) -> None:
        self.batch, self.query_len, self.shape, self._sink_lane = batch, query_len, shape, sink_lane
        self._trees = trees
        self._fields = StagedFields(_fields(batch, query_len, shape.num_tables, shape.blocks_per_seq, trees), device)
        self._sinks = sink_blocks(shape)
        self.device = self._fields.device
        for host in self._fields.stages:
            self._pad(host, 0)
        self._fields.send()

    def _pad(self, host: dict[str, np.ndarray], start: int) -> None:
        first = start * self.query_len
        host["host_ids"][first:] = 0
        host["positions"][first:] = 0
        host["slots"][:, first:] = self._sinks * self.shape.block_size
        host["lanes"][start:] = self._sink_lane
        host["context_lens"][start:] = 0
        host["tables"][:, start:] = self._sinks[:, None]

    def fill(self, rows: Sequence[Scheduled | None], space: KVSpace) -> None:
        """Write a step (one entry or hole per row) to the next stage and queue its copy to the device."""
        host = self._fields.stage()
        entries = [entry for entry in rows if entry is not None]
        holes = len(entries) < len(rows)
        self._pad(host, 0 if holes else len(rows))
        where = [row for row, entry in enumerate(rows) if entry is not None] if holes else slice(0, len(rows))
        packed = arrange([_packed(entry) for entry in entries], space, self.shape, trees=self._trees)
        by_row = (len(entries), self.query_len)
        if packed.tree_mask is not None:
            host["tree_mask"].reshape(-1, self.query_len)[where] = packed.tree_mask.reshape(by_row)
        host["host_ids"].reshape(-1, self.query_len)[where] = packed.ids.reshape(by_row)
        host["positions"].reshape(-1, self.query_len)[where] = packed.positions.reshape(by_row)
        host["lanes"][where] = [entry.sequence.lane for entry in entries]
        host["context_lens"][where] = packed.context
        for number, (table, slots) in enumerate(zip(packed.tables, packed.slots, strict=True)):
            host["tables"][number][where, : table.shape[1]] = table
            host["slots"][number].reshape(-1, self.query_len)[where] = slots.reshape(by_row)
        self._fields.send()

    def as_batch(self, context: int) -> Batch:
        """The persistent tensors as a `Batch`; `input_ids` is filled by the captured step itself."""
        device = self.device["positions"].device
        tokens = self.batch * self.query_len
        width = -(-context // self.shape.block_size)
        tables = tuple(
            GroupBatch(self.device["slots"][number], self.device["tables"][number, :, :width])
            for number in range(self.shape.num_tables)
        )
        return Batch(
            input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=self.device["positions"],
            cu_seqlens_q=torch.arange(0, tokens + 1, self.query_len, dtype=torch.int32, device=device),
            context_lens=self.device["context_lens"],
            logits_rows=torch.arange(tokens, device=device),
            groups=tuple(tables[number] for number in self.shape.group_tables or (0,) * len(self.shape.groups)),
            query_lens=(self.query_len,) * self.batch,
            host_context_lens=None,
            query_len=self.query_len,
            context_capacity=context,
            tables=tables,
            tree_mask=self.device["tree_mask"] if self._trees else None,
        )


def fewest_blocks(shape: KVShape) -> int:
    """Blocks of the smallest pool: no more sequences can run at once."""
    return min(shape.blocks_of(number) for number in range(shape.num_tables))


def _packed(entry: Scheduled) -> PackEntry:
    """New tokens of a row; -1 stands for the one that only the device knows."""
    seq, start = entry.sequence, entry.sequence.num_computed
    known = seq.tokens[start : start + entry.num_own_tokens]
    in_flight = entry.num_own_tokens - len(known)
    return PackEntry(seq.seq_id, [*known, *[-1] * in_flight, *entry.draft_ids], start, entry.draft_parents)


@dataclass(slots=True)
class CapturedStep:
    """A graph and every tensor that it reads or writes by address: `batch` must live as long as the graph.

    `logits [batch * query_len, V]`, `token_lanes [batch * query_len]`, `most_likely` (the token of the largest
    logit, `None` for longer queries than one) and `hidden [batch * query_len, D]` (`None` unless a decoder reads it)
    hold the last replay's results.
    """

    graph: torch.cuda.CUDAGraph
    buffers: StepBuffers
    batch: Batch
    logits: Tensor
    token_lanes: Tensor
    most_likely: Tensor | None
    hidden: Tensor | None = None


@contextmanager
def _waits_forbidden() -> Iterator[None]:
    """Whatever makes the host wait for the device raises: no graph could hold it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at every change that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def captured(work: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """`work` as a graph in the memory `pool`, and what it returned: persistent tensors, rewritten by each replay.

    It runs twice before, on a stream of its own, so that nothing is compiled, tuned or allocated in the capture. The
    second run must not wait for the device: raises `RuntimeError` before anything is captured when it does.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        with _waits_forbidden():
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = work()
    return graph, result


class StepGraphs:
    """Captured steps of one engine. `next_ids` is the sampler's device table, read inside the graph.

    Batches end at the sequences that the KV can hold at once, which may be fewer than the engine has lanes. With
    `trees`, steps of longer queries than one read a tree mask.
    """

    def __init__(
        self,
        joint: Joint,
        shape: KVShape,
        next_ids: Tensor,
        max_num_seqs: int,
        query_lens: Sequence[int] = (1,),
        selector: TokenSelector = TorchSelector(),
        trees: bool = False,
    ) -> None:
        self._trees = trees
        self._joint, self._shape, self._next_ids = joint, shape, next_ids
        self._max_num_seqs = max_num_seqs
        self._query_lens, self._selector = tuple(query_lens), selector
        self._batches = batch_buckets(min(max_num_seqs, fewest_blocks(shape)))
        self._contexts = context_buckets(shape.max_model_len)
        self._buffers: dict[tuple[int, int], StepBuffers] = {}
        self._steps: dict[GraphKey, CapturedStep] = {}
        self.pool: Any = None

    @property
    def keys(self) -> list[GraphKey]:
        return sorted(self._steps)

    @property
    def wanted(self) -> list[GraphKey]:
        """Every key, largest first."""
        keys = [GraphKey(b, q, c) for q in self._query_lens for b in self._batches for c in self._contexts]
        return sorted(keys, reverse=True)

    def capture_all(self) -> Iterator[float]:
        """Capture every key, largest first so that the smaller ones reuse its memory; yields the fraction done."""
        for done, key in enumerate(self.wanted):
            self._steps[key] = self._capture(key)
            yield (done + 1) / len(self.wanted)

    def find(self, num_rows: int, query_len: int, context: int) -> CapturedStep | None:
        """The smallest captured step that holds `num_rows` rows; `None` when there is none."""
        batch = next((b for b in self._batches if b >= num_rows), None)
        bucket = next((c for c in self._contexts if c >= context), None)
        if batch is None or bucket is None:
            return None
        return self._steps.get(GraphKey(batch, query_len, bucket))

    def _capture(self, key: GraphKey) -> CapturedStep:
        shared = (key.batch, key.query_len)
        if shared not in self._buffers:
            device = self._next_ids.device
            trees = self._trees and key.query_len > 1
            self._buffers[shared] = StepBuffers(*shared, self._shape, self._max_num_seqs, device, trees)
        buffers = self._buffers[shared]
        batch = buffers.as_batch(key.context)
        graph, outputs = captured(lambda: self._step(buffers, batch), self.pool)
        self.pool = self.pool or graph.pool()
        return CapturedStep(graph, buffers, batch, *outputs)

    def _step(self, buffers: StepBuffers, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Logits of every token of the step, the lane of each, their most likely tokens, hidden states.

        A token in flight comes from the device.
        """
        host_ids = buffers.device["host_ids"]
        lanes = buffers.device["lanes"][:, None].expand(-1, buffers.query_len).reshape(-1)
        batch.input_ids.copy_(torch.where(host_ids < 0, self._next_ids[lanes], host_ids))
        logits = self._joint.forward(batch)
        most_likely = self._selector.greedy(logits) if buffers.query_len == 1 else None
        return logits, lanes, most_likely, self._joint.take_hidden()
