"""Search for the fastest launch parameters, one after the other from the defaults, and how a launch is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import triton

#: Seconds of one of several calls that do the same on different memory.
Measure = Callable[[Sequence[Callable[[], object]]], float]

#: What another value has to gain: less than that is noise.
_MARGIN = 0.985
_REPLAYS = 7

L = TypeVar("L")


def search(
    starts: Sequence[L], axes: Callable[[L], Mapping[str, Sequence[Any]]], seconds: Callable[[L], float | None]
) -> tuple[L, float]:
    """(The fastest launch found, its seconds).

    Starts at the fastest of `starts`, then tries each value of each axis (a field of the launch) in turn and keeps
    what gains more than noise. `seconds` is `None` for a launch that does not work. All combinations would take the
    compiler hours; the axes hardly depend on each other. Raises `RuntimeError` when no start works.
    """
    known: dict[L, float | None] = {}

    def timed(launch: L) -> float | None:
        if launch not in known:
            known[launch] = seconds(launch)
        return known[launch]

    best, shortest = _fastest(starts, timed)
    for axis, values in axes(best).items():
        for value in values:
            other = replace(best, **{axis: value})  # type: ignore[type-var]
            found = timed(other)
            if found is not None and found < _MARGIN * shortest:
                best, shortest = other, found
    return best, shortest


def _fastest(starts: Sequence[L], timed: Callable[[L], float | None]) -> tuple[L, float]:
    """The first one counts as the default: another has to gain more than noise."""
    best: tuple[L, float] | None = None
    for launch in starts:
        found = timed(launch)
        if found is not None and (best is None or found < _MARGIN * best[1]):
            best = launch, found
    if best is None:
        raise RuntimeError(f"no launch parameters work, starting from {starts[0]}")
    return best


def seconds_of(calls: Sequence[Callable[[], object]], measure: Measure | None) -> float | None:
    """Seconds of a call; `None` when the device has no resources for its launch, or the compiler no code."""
    errors = triton.runtime.errors
    try:
        return (measure or graph_seconds)(calls)
    except (errors.OutOfResources, errors.PTXASError, triton.CompilationError):
        return None
    except RuntimeError as error:
        if "PassManager::run failed" in str(error):
            return None
        raise


def graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """The median of some replays of all calls in one CUDA graph, for one call. Needs a CUDA device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = sorted(_replay_seconds(graph) for _ in range(_REPLAYS))
    return times[len(times) // 2] / len(calls)


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
