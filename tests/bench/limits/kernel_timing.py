"""What every row of the kernel limits needs: ceilings, times of launches in CUDA graphs, rows that survive failures.

Without a GPU (the smoke test) kernels are interpreted on tiny shapes and times mean nothing.
"""

from __future__ import annotations

import fnmatch
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
#: The interpreter computes bfloat16 wrongly.
DTYPE = torch.bfloat16 if GPU else torch.float16
#: Bytes between two reads of the same memory, so that none comes from the L2 cache.
COLD_BYTES = (200 << 20) if GPU else 1
_REPEATS = 15 if GPU else 1

Call = Callable[[], object]


def graph_seconds(calls: Sequence[Call]) -> float:
    """Seconds of one call: the median of replays of all of them in one CUDA graph, one after the other."""
    if not GPU:
        begin = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begin) / len(calls)
    graph = captured(calls)
    for _ in range(3):
        graph.replay()
    return statistics.median(replay_seconds(graph.replay) for _ in range(_REPEATS)) / len(calls)


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_seconds(work: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def flushed_seconds(call: Call) -> float:
    """The median of single launches, each after 256 MiB of zeros went through the L2 cache."""
    if not GPU:
        return graph_seconds([call])
    from triton.testing import do_bench

    return do_bench(call, warmup=25, rep=200, return_mode="median") / 1e3


@dataclass(frozen=True)
class Ceilings:
    """Bytes read and written per second by a large copy; FLOP/s of an 8192^3 product."""

    copy: float
    matmul: float


def ceilings() -> Ceilings:
    side = 8192 if GPU else 32
    a, b = (torch.randn(side, side, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return Ceilings(_copy_bandwidth(), 2 * side**3 / graph_seconds([lambda: torch.mm(a, b)] * 4))


def _copy_bandwidth() -> float:
    source = torch.randn(1 << 29 if GPU else 1 << 12, device=DEVICE)
    target = torch.empty_like(source)
    # Not in a graph: there a copy becomes a copy node, which is slower than the kernel that it is outside.
    work = lambda: target.copy_(source)  # noqa: E731
    if not GPU:
        return 8 * source.numel() / graph_seconds([work])
    for _ in range(3):
        work()
    return 8 * source.numel() / statistics.median(replay_seconds(work) for _ in range(_REPEATS))


def relative_error(out: Tensor, reference: Tensor) -> float:
    """|out - reference| / |reference|, 2-norms; NaN stays NaN and passes no bound."""
    difference = torch.linalg.vector_norm(out.double() - reference.double())
    return float(difference / torch.linalg.vector_norm(reference.double()))


@dataclass(frozen=True)
class Goal:
    """What a figure has to reach. `higher`: the larger the better."""

    unit: str
    higher: bool
    target: float | None = None
    stretch: float | None = None
    #: The figure divided by this is what the target is about (a ceiling), 1 for plain figures.
    over: float = 1.0

    def ratio(self, value: float, limit: float | None) -> float | None:
        """1 and more: reached."""
        if limit is None:
            return None
        return value / self.over / limit if self.higher else limit / (value / self.over)


@dataclass
class Measured:
    """One contender in one row; `value` in the row's unit."""

    row: str
    contender: str
    unit: str
    value: float | None = None
    of_ceiling: float | None = None
    error: float | None = None
    target: float | None = None
    of_target: float | None = None
    of_stretch: float | None = None
    failure: str | None = None


@dataclass
class Sheet:
    """Collects rows, prints each at once, and saves after each."""

    save: Callable[[Sheet], None]
    patterns: Sequence[str] = ("*",)
    done: frozenset[tuple[str, str]] = frozenset()
    rows: list[Measured] = field(default_factory=list)

    def wants(self, row: str) -> bool:
        return any(fnmatch.fnmatch(row, pattern) or pattern in row for pattern in self.patterns)

    def add(
        self,
        row: str,
        contender: str,
        goal: Goal,
        measure: Callable[[], tuple[float, float | None]],
        *,
        ours: bool = False,
        bound: float = 2e-2,
        ceiling: float | None = None,
    ) -> float | None:
        """`measure` gives (value, relative error). A failure is recorded, and a wrong result is no figure."""
        if not self.wants(row) or (row, contender) in self.done:
            return None
        entry = Measured(row, contender, goal.unit, target=goal.target)
        try:
            value, entry.error = measure()
            if entry.error is not None and not entry.error < bound:
                entry.failure = f"wrong: error {entry.error:.2e}, {bound:.0e} is allowed"
            else:
                entry.value = value
                entry.of_ceiling = None if ceiling is None else value / ceiling
                entry.of_target = goal.ratio(value, goal.target) if ours else None
                entry.of_stretch = goal.ratio(value, goal.stretch) if ours else None
        except Exception as failure:  # a peer that fails must not end the run
            entry.failure = f"{type(failure).__name__}: {str(failure).strip()[:300]}"
        self.rows.append(entry)
        print(line(entry), flush=True)
        self.save(self)
        if GPU:
            torch.cuda.empty_cache()
        return entry.value

    def dump(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]


def line(row: Measured) -> str:
    if row.failure is not None:
        return f"{row.row:<40} {row.contender:<26} FAILED {row.failure}"
    parts = [f"{row.row:<40} {row.contender:<26} {row.value:>10.4g} {row.unit:<8}"]
    parts.append(f"{row.of_ceiling:>6.3f} of ceiling" if row.of_ceiling is not None else " " * 17)
    parts.append(f"err {row.error:.1e}" if row.error is not None else "")
    if row.of_target is not None:
        parts.append(f"ours / target {row.of_target:.3f}")
    if row.of_stretch is not None:
        parts.append(f"/ stretch {row.of_stretch:.3f}")
    return "  ".join(parts)
