"""Steps of uniform query length replayed from CUDA graphs.

A graph is keyed by (batch, query length, context bucket): decode has query length 1, verification 1 + drafts. All
metadata of a step lives in one pinned host buffer and one device buffer, both carved into the tensors of a `Batch`; a
step costs one copy and one replay. Padded rows belong to the sink lane, have context length 0 and write to the sink
block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infermix.engine.packing import num_dropped
from infermix.roles.batch import Batch, GroupBatch

if TYPE_CHECKING:
    from torch import Tensor

    from infermix.engine.bridge import Joint
    from infermix.roles.kv_space import KVShape, KVSpace
    from infermix.roles.scheduler import Scheduled

#: How many steps may be in preparation at once: the one that runs, the one being queued, one spare.
_STAGES = 3


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


@dataclass(frozen=True)
class _Field:
    name: str
    dtype: Any
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def _layout(batch: int, query_len: int, tables: int, width: int) -> list[_Field]:
    tokens = batch * query_len
    wanted: list[tuple[str, Any, tuple[int, ...]]] = [
        ("host_ids", np.int64, (tokens,)),
        ("positions", np.int64, (tokens,)),
        ("slots", np.int64, (tables, tokens)),
        ("lanes", np.int64, (batch,)),
        ("rows", np.int64, (tokens,)),
        ("context_lens", np.int32, (batch,)),
        ("tables", np.int32, (tables, batch, width)),
    ]
    fields, offset = [], 0
    for name, dtype, shape in wanted:
        field = _Field(name, dtype, shape, offset)
        fields.append(field)
        offset += -(-field.num_bytes // 16) * 16
    return fields


class StepBuffers:
    """Host stages and device tensors of one (batch, query length): filled in place, copied in one piece."""

    def __init__(self, batch: int, query_len: int, shape: KVShape, sink_lane: int, device: torch.device) -> None:
        self.batch, self.query_len, self.shape, self._sink_lane = batch, query_len, shape, sink_lane
        fields = _layout(batch, query_len, shape.num_tables, shape.blocks_per_seq)
        self._sinks = np.array([[shape.blocks_of(number)] for number in range(shape.num_tables)])
        total = fields[-1].offset + fields[-1].num_bytes
        pinned = device.type == "cuda"
        self._stages = [torch.empty(total, dtype=torch.uint8, pin_memory=pinned) for _ in range(_STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(_STAGES)] if pinned else []
        self._host = [
            {f.name: np.ndarray(f.shape, f.dtype, stage.numpy(), f.offset) for f in fields} for stage in self._stages
        ]
        self._device_bytes = torch.empty(total, dtype=torch.uint8, device=device)
        self.device = {f.name: self._device_view(f) for f in fields}
        self._turn = 0
        for host in self._host:
            self._pad(host, 0)
        self._device_bytes.copy_(self._stages[0])

    def _device_view(self, field: _Field) -> Tensor:
        dtype = torch.int64 if field.dtype is np.int64 else torch.int32
        return self._device_bytes[field.offset : field.offset + field.num_bytes].view(dtype).view(field.shape)

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
        self._turn = (self._turn + 1) % _STAGES
        if self._copied:
            self._copied[self._turn].synchronize()  # done long ago unless a decoder launches many steps unread
        host = self._host[self._turn]
        self._pad(host, 0 if None in rows else len(rows))
        for index, entry in enumerate(rows):
            if entry is not None:
                self._fill_row(host, index, entry, space)
        self._device_bytes.copy_(self._stages[self._turn], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()

    def _fill_row(self, host: dict[str, np.ndarray], index: int, entry: Scheduled, space: KVSpace) -> None:
        seq, count = entry.sequence, entry.num_new_tokens
        start, block_size = seq.num_computed, self.shape.block_size
        cached = start - num_dropped(space, seq.seq_id, start, count)
        first = index * count
        known = seq.tokens[start : start + entry.num_own_tokens]
        in_flight = entry.num_own_tokens - len(known)
        host["host_ids"][first : first + count] = [*known, *[-1] * in_flight, *entry.draft_ids]
        host["positions"][first : first + count] = range(start, start + count)
        host["lanes"][index] = seq.lane
        host["context_lens"][index] = cached + count
        for number in range(host["tables"].shape[0]):
            table = space.block_table(seq.seq_id, number)
            host["tables"][number, index, : len(table)] = table
            for offset in range(count):
                place = cached + offset
                slot = table[place // block_size] * block_size + place % block_size
                host["slots"][number, first + offset] = slot

    def as_batch(self, context: int) -> Batch:
        """The persistent tensors as a `Batch`; `input_ids` is filled by the captured step itself."""
        device = self._device_bytes.device
        tokens = self.batch * self.query_len
        width = -(-context // self.shape.block_size)
        groups = self.shape.group_tables or (0,) * len(self.shape.groups)
        return Batch(
            input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=self.device["positions"],
            cu_seqlens_q=torch.arange(0, tokens + 1, self.query_len, dtype=torch.int32, device=device),
            context_lens=self.device["context_lens"],
            logits_rows=torch.arange(tokens, device=device),
            groups=tuple(
                GroupBatch(self.device["slots"][number], self.device["tables"][number, :, :width])
                for number in groups
            ),
            query_lens=(self.query_len,) * self.batch,
            host_context_lens=None,
            query_len=self.query_len,
            context_capacity=context,
        )


@dataclass(slots=True)
class CapturedStep:
    """A graph and every tensor that it reads or writes by address: `batch` must live as long as the graph.

    `logits [batch * query_len, V]` and `token_lanes [batch * query_len]` hold the last replay's results.
    """

    graph: torch.cuda.CUDAGraph
    buffers: StepBuffers
    batch: Batch
    logits: Tensor
    token_lanes: Tensor


class StepGraphs:
    """Captured steps of one engine. `next_ids` is the sampler's device table, read inside the graph."""

    def __init__(
        self,
        joint: Joint,
        shape: KVShape,
        next_ids: Tensor,
        max_num_seqs: int,
        query_lens: Sequence[int] = (1,),
    ) -> None:
        self._joint, self._shape, self._next_ids = joint, shape, next_ids
        self._max_num_seqs = max_num_seqs
        self._query_lens = tuple(query_lens)
        self._batches = batch_buckets(max_num_seqs)
        self._contexts = context_buckets(shape.max_model_len)
        self._buffers: dict[tuple[int, int], StepBuffers] = {}
        self._steps: dict[GraphKey, CapturedStep] = {}
        self._pool: Any = None

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
            self._buffers[shared] = StepBuffers(*shared, self._shape, self._max_num_seqs, device)
        buffers = self._buffers[shared]
        batch = buffers.as_batch(key.context)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(buffers, batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, lanes = self._step(buffers, batch)
        self._pool = self._pool or graph.pool()
        return CapturedStep(graph, buffers, batch, logits, lanes)

    def _step(self, buffers: StepBuffers, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits of every token of the step, and the lane of each; a token in flight comes from the device."""
        host_ids = buffers.device["host_ids"]
        lanes = buffers.device["lanes"][:, None].expand(-1, buffers.query_len).reshape(-1)
        batch.input_ids.copy_(torch.where(host_ids < 0, self._next_ids[lanes], host_ids))
        return self._joint.forward(batch), lanes
