"""Prefill and mixed steps replayed from CUDA graphs: any query lengths, padded to a number of tokens.

A graph is keyed by its number of tokens alone. All of them share one set of buffers: room for every sequence, and one
more that owns the padding tokens of a step (context length 0, so that attention returns zeros for them). Nothing
else depends on the query lengths: products and norms work on tokens, the KV write on slots, and attention reads the
lengths on the device. That is why attention and KV layout have to say that they can do so (`graph:mixed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infermix.engine.graphs import captured, fewest_blocks
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

#: Longest context of a captured mixed step: its attention gives each decoding sequence one program per KV head,
#: which over long contexts takes longer than an eager step takes to launch.
MAX_CONTEXT = 16384
#: Most tokens of a captured step, whatever the model.
MAX_TOKENS = 8192
#: FLOPs that a device does in the time that any host takes to launch an eager step (about 12 ms at 400 TFLOP/s): a
#: step with less work is waiting for the host. Kernels launched from Python and faster products move the limit up.
_FLOPS_PER_HOST_STEP = 5e12


def worthwhile_tokens(num_parameters: int) -> int:
    """A step, a power of two, whose products surely take the device no longer than launching them the host."""
    limit = min(_FLOPS_PER_HOST_STEP / (2 * max(num_parameters, 1)), MAX_TOKENS)
    return 1 << max(int(limit), 1).bit_length() - 1


def token_buckets(max_tokens: int) -> list[int]:
    """Powers of two from 16 to 512, steps of 512 to 4096, steps of 1024 beyond, and `max_tokens`."""
    sizes = [*(1 << bits for bits in range(4, 10)), *range(1024, 4097, 512), *range(5120, max_tokens, 1024)]
    return [*(size for size in sizes if size < max_tokens), max_tokens]


def _fields(max_tokens: int, num_seqs: int, tables: int, width: int) -> list[FieldSpec]:
    return [
        ("host_ids", np.int64, (max_tokens,)),
        ("positions", np.int64, (max_tokens,)),
        ("slots", np.int64, (tables, max_tokens)),
        ("rows", np.int64, (num_seqs,)),
        ("lanes", np.int64, (num_seqs,)),
        ("starts", np.int32, (num_seqs + 2,)),
        ("context_lens", np.int32, (num_seqs + 1,)),
        ("tables", np.int32, (tables, num_seqs + 1, width)),
    ]


class MixedBuffers:
    """Host stages and device tensors of up to `max_tokens` tokens of up to `num_seqs` sequences.

    `host_ids` below 0 stand for tokens in flight: -1 - lane.
    """

    def __init__(
        self, max_tokens: int, num_seqs: int, shape: KVShape, sink_lane: int, max_context: int, device: torch.device
    ) -> None:
        self.max_tokens, self.num_seqs, self.shape, self._sink_lane = max_tokens, num_seqs, shape, sink_lane
        self._max_context = max_context
        self._sinks = sink_blocks(shape)
        width = -(-max_context // shape.block_size)
        self._fields = StagedFields(_fields(max_tokens, num_seqs, shape.num_tables, width), device)
        self.device = self._fields.device
        for host in self._fields.stages:
            host["rows"][:] = 0
            host["lanes"][:] = sink_lane
            self._pad(host, max_tokens, 0, 0)
        self._fields.send()

    def _pad(self, host: dict[str, np.ndarray], bucket: int, num_tokens: int, num_seqs: int) -> None:
        """Everything behind the first tokens and sequences: one sequence more owns the tokens up to `bucket`."""
        host["host_ids"][num_tokens:bucket] = 0
        host["positions"][num_tokens:bucket] = 0
        host["slots"][:, num_tokens:bucket] = self._sinks * self.shape.block_size
        host["starts"][num_seqs] = num_tokens
        host["starts"][num_seqs + 1 :] = bucket
        host["context_lens"][num_seqs:] = 0
        host["tables"][:, num_seqs:] = self._sinks[:, None]

    def fill(
        self, entries: Sequence[Scheduled], rows: Sequence[int], lanes: Sequence[int], bucket: int, space: KVSpace
    ) -> None:
        """Write a step to the next stage and queue its copy; `rows` are the tokens whose logits are wanted."""
        host = self._fields.stage()
        packed = arrange([_packed(entry) for entry in entries], space, self.shape)
        count, num_seqs = len(packed.ids), len(entries)
        self._pad(host, bucket, count, num_seqs)
        host["host_ids"][:count] = packed.ids
        host["positions"][:count] = packed.positions
        host["starts"][: num_seqs + 1] = packed.starts
        host["context_lens"][:num_seqs] = packed.context
        for number, (table, slots) in enumerate(zip(packed.tables, packed.slots, strict=True)):
            host["tables"][number, :num_seqs, : table.shape[1]] = table
            host["slots"][number, :count] = slots
        host["rows"][: len(rows)] = rows
        host["rows"][len(rows) :] = 0
        host["lanes"][: len(rows)] = lanes
        host["lanes"][len(rows) :] = self._sink_lane
        self._fields.send()

    def fill_idle(self, bucket: int) -> None:
        """A step of nothing but padding."""
        self._pad(self._fields.stage(), bucket, 0, 0)
        self._fields.send()

    def as_batch(self, bucket: int) -> Batch:
        """The first `bucket` tokens as a `Batch` of all sequences; `input_ids` is filled by the captured step."""
        device = self.device
        groups = self.shape.group_tables or (0,) * len(self.shape.groups)
        return Batch(
            input_ids=torch.zeros(bucket, dtype=torch.int64, device=device["positions"].device),
            positions=device["positions"][:bucket],
            cu_seqlens_q=device["starts"],
            context_lens=device["context_lens"],
            logits_rows=device["rows"],
            groups=tuple(GroupBatch(device["slots"][number, :bucket], device["tables"][number]) for number in groups),
            query_lens=(bucket,) * (self.num_seqs + 1),
            host_context_lens=None,
            query_len=None,
            context_capacity=self._max_context,
        )


def _packed(entry: Scheduled) -> PackEntry:
    """New tokens of a sequence, the one in flight as -1 - lane."""
    seq, start = entry.sequence, entry.sequence.num_computed
    known = seq.tokens[start : start + entry.num_own_tokens]
    in_flight = [-1 - seq.lane] * (entry.num_own_tokens - len(known))
    return PackEntry(seq.seq_id, [*known, *in_flight, *entry.draft_ids], start)


@dataclass(slots=True)
class MixedStep:
    """A graph and what it reads and writes: `logits [num_seqs, V]`, `lanes`, `most_likely [num_seqs]`."""

    graph: torch.cuda.CUDAGraph
    num_tokens: int
    batch: Batch
    logits: Tensor
    lanes: Tensor
    most_likely: Tensor


class MixedGraphs:
    """Captured prefill and mixed steps of one engine, in the memory of `pool`."""

    def __init__(
        self,
        joint: Joint,
        shape: KVShape,
        next_ids: Tensor,
        max_num_seqs: int,
        max_tokens: int,
        selector: TokenSelector = TorchSelector(),
        pool: Any = None,
    ) -> None:
        self._joint, self._next_ids, self._selector, self._pool = joint, next_ids, selector, pool
        self.max_context = min(shape.max_model_len, MAX_CONTEXT)
        self.buckets = token_buckets(max_tokens)
        num_seqs = min(max_num_seqs, fewest_blocks(shape))
        self.buffers = MixedBuffers(
            max_tokens, num_seqs, shape, max_num_seqs, self.max_context, next_ids.device
        )  # fmt: skip
        self._steps: dict[int, MixedStep] = {}

    @property
    def keys(self) -> list[int]:
        return sorted(self._steps)

    def limit(self, max_tokens: int) -> None:
        """Capture no larger steps than that; before anything is captured."""
        self.buckets = token_buckets(max_tokens)

    def run_idle(self, num_tokens: int) -> None:
        """Launch an eager step of nothing but padding."""
        self.buffers.fill_idle(num_tokens)
        self._step(self.buffers.as_batch(num_tokens))

    def capture_all(self) -> Iterator[float]:
        """Capture every number of tokens, the largest first; yields the fraction done."""
        for done, bucket in enumerate(reversed(self.buckets)):
            batch = self.buffers.as_batch(bucket)
            self.buffers.fill_idle(bucket)
            graph, outputs = captured(partial(self._step, batch), self._pool)
            self._pool = self._pool or graph.pool()
            self._steps[bucket] = MixedStep(graph, bucket, batch, *outputs)
            yield (done + 1) / len(self.buckets)

    def find(self, num_seqs: int, num_tokens: int, context: int) -> MixedStep | None:
        """The smallest captured step that holds so much; `None` when there is none."""
        if num_seqs > self.buffers.num_seqs or context > self.max_context:
            return None
        bucket = next((size for size in self.buckets if size >= num_tokens), None)
        return None if bucket is None else self._steps.get(bucket)

    def _step(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the wanted rows, the lane of each, and their most likely tokens."""
        device = self.buffers.device
        host_ids = device["host_ids"][: batch.num_tokens]
        sampled = self._next_ids[(-1 - host_ids).clamp_(min=0)]
        batch.input_ids.copy_(torch.where(host_ids < 0, sampled, host_ids))
        logits = self._joint.forward(batch)
        return logits, device["lanes"], self._selector.greedy(logits)
