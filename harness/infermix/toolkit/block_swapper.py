"""Copies of swapped sequences between a store's blocks and pinned host memory, beside the steps that run.

Blocks of one sequence lie scattered over every layer. They are gathered into a contiguous staging buffer on the
device, and each stretch of consecutive host blocks then moves in one copy; the way back is the same in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infermix.errors import OutOfMemory, Unsupported
from infermix.roles.kv_space import BlockMoves, KVShape
from infermix.toolkit.block_rows import BlockRows, runs

if TYPE_CHECKING:
    from infermix.roles.kv_store import KVStore

#: Device memory that blocks pass through: large enough for full bandwidth, and for a step to go on soon.
STAGING_BYTES = 128 << 20


class _Table:
    """The blocks of one block table: rows on the device, rows on the host, and what lies between."""

    def __init__(self, rows: BlockRows, num_host_blocks: int, device: torch.device, staging_bytes: int) -> None:
        self.rows = rows
        self.host = _host_rows(num_host_blocks, rows, pinned=device.type == "cuda")
        size = max(1, min(staging_bytes // max(rows.block_bytes, 1), num_host_blocks))
        self.staging = torch.empty((size, rows.width), dtype=rows.unit, device=device)


def _host_rows(count: int, rows: BlockRows, pinned: bool) -> Tensor:
    try:
        return torch.empty((count, rows.width), dtype=rows.unit, pin_memory=pinned)
    except RuntimeError as error:
        raise OutOfMemory(f"no host memory for {count} blocks of {rows.block_bytes} bytes: {error}") from error


class BlockSwapper:
    """Executes `BlockMoves` in the order given; on CUDA on a stream of its own.

    The compute stream waits until blocks that were swapped out have left the pool, since the next step may overwrite
    them, and before a step reads a sequence that comes back. Both waits are the stall time. Blocks that a swapped-in
    sequence gives up while it still arrives need `wait_for` too.
    """

    def __init__(
        self,
        store: KVStore,
        shape: KVShape,
        device: torch.device,
        clock_ns: Callable[[], int],
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        block_tensors = getattr(store, "block_tensors", None)
        if block_tensors is None:
            raise Unsupported(f"{type(store).__name__} does not say which tensors its blocks are in (block_tensors)")
        self._tables = [
            _Table(BlockRows(block_tensors(number)), shape.host_blocks_of(number), device, staging_bytes)
            for number in range(shape.num_tables)
        ]
        self._device = device
        self._timer: _CudaTimer | _HostTimer = _CudaTimer() if device.type == "cuda" else _HostTimer(clock_ns)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arriving: dict[int, torch.cuda.Event | None] = {}
        self._bytes = {"out": 0, "in": 0}
        self._count = {"out": 0, "in": 0}

    @property
    def host_bytes(self) -> int:
        return sum(table.host.numel() * table.host.element_size() for table in self._tables)

    def execute(self, moves: Sequence[BlockMoves]) -> None:
        """Queue the copies behind everything launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        left: torch.cuda.Event | None = None
        with self._beside():
            for move in moves:
                left = self._execute_one(move) or left
        if left is not None:
            self._wait(left)

    def wait_for(self, seq_ids: Iterable[int]) -> None:
        """Let the compute stream wait for these sequences' blocks, if they are still arriving."""
        if not self._arriving:
            return
        for seq_id in seq_ids:
            event = self._arriving.pop(seq_id, None)
            if event is not None:
                self._wait(event)

    def counters(self) -> dict[str, float]:
        """Sums since `reset`: sequences and bytes each way, seconds the copies took, seconds that steps waited.

        Waits for what is under way.
        """
        seconds = self._timer.seconds()
        figures = {"swap_stall_s": seconds["stall"]}
        for way in ("out", "in"):
            figures[f"swaps_{way}"] = float(self._count[way])
            figures[f"swap_{way}_bytes"] = float(self._bytes[way])
            figures[f"swap_{way}_s"] = seconds[way]
            figures[f"swap_{way}_bytes_per_s"] = self._bytes[way] / seconds[way] if seconds[way] else 0.0
        return figures

    def reset(self) -> None:
        """Wait for what is under way and start counting anew."""
        self.wait_for(list(self._arriving))
        self._timer.clear()
        self._bytes = {"out": 0, "in": 0}
        self._count = {"out": 0, "in": 0}

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait(self, event: torch.cuda.Event) -> None:
        """Everything launched from now on waits for `event`."""
        stream = torch.cuda.current_stream(self._device)
        start = self._timer.mark(stream)
        stream.wait_event(event)
        self._timer.add("stall", start, stream)

    def _execute_one(self, move: BlockMoves) -> torch.cuda.Event | None:
        """Returns when the blocks have left the pool, for a move to the host on CUDA."""
        way = "out" if move.to_host else "in"
        start = self._timer.mark(self._stream)
        copy = self._out if move.to_host else self._in
        left = None
        for table, device, host in zip(self._tables, move.device_blocks, move.host_blocks, strict=True):
            left = copy(table, device, host) or left
            self._bytes[way] += len(device) * table.rows.block_bytes
        self._count[way] += 1
        self._timer.add(way, start, self._stream)
        if not move.to_host and self._stream is not None:
            self._arriving[move.seq_id] = self._stream.record_event()
        return left

    def _out(self, table: _Table, device: Sequence[int], host: Sequence[int]) -> torch.cuda.Event | None:
        left = None
        for start in range(0, len(device), len(table.staging)):
            blocks = device[start : start + len(table.staging)]
            staged = table.staging[: len(blocks)]
            table.rows.gather(self._index(blocks), staged)
            left = self._stream.record_event() if self._stream is not None else None
            for offset, first, count in runs(host[start : start + len(blocks)]):
                table.host[first : first + count].copy_(staged[offset : offset + count], non_blocking=True)
        return left

    def _in(self, table: _Table, device: Sequence[int], host: Sequence[int]) -> None:
        for start in range(0, len(device), len(table.staging)):
            blocks = device[start : start + len(table.staging)]
            staged = table.staging[: len(blocks)]
            for offset, first, count in runs(host[start : start + len(blocks)]):
                staged[offset : offset + count].copy_(table.host[first : first + count], non_blocking=True)
            table.rows.scatter(self._index(blocks), staged)

    def _index(self, blocks: Sequence[int]) -> Tensor:
        index = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._stream is not None)
        return index.to(self._device, non_blocking=True)


class _HostTimer:
    """Copies on a CPU are done when the call returns, and nothing else runs meanwhile: all of it is stall."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self.clear()

    def clear(self) -> None:
        self._seconds = {"out": 0.0, "in": 0.0, "stall": 0.0}

    def mark(self, stream: Any) -> Any:
        return self._clock_ns()

    def add(self, what: str, start: Any, stream: Any) -> None:
        elapsed = (self._clock_ns() - start) / 1e9
        self._seconds[what] += elapsed
        self._seconds["stall"] += elapsed

    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)


class _CudaTimer:
    """Pairs of events, read when somebody asks."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._pairs: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = {"out": 0.0, "in": 0.0, "stall": 0.0}

    def mark(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def add(self, what: str, start: Any, stream: Any) -> None:
        self._pairs.append((what, start, self.mark(stream)))

    def seconds(self) -> dict[str, float]:
        for what, start, end in self._pairs:
            end.synchronize()
            self._seconds[what] += start.elapsed_time(end) / 1e3
        self._pairs.clear()
        return dict(self._seconds)
