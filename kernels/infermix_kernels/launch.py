"""Launch parameters of the attention kernels: defaults by shape class, measured ones from a file per machine.

Nothing is ever measured inside an ordinary call: `tune` is called on its own, and its result is looked up later in a
`LaunchTable` that the caller hands in.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import triton

#: Shared memory that one program may use on the smallest device with tensor-core tiles of this size.
_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class Launch:
    """Tile of query rows and of tokens, warps and pipeline stages of a program.

    `programs_per_sm` is how many programs the split of a context aims at per multiprocessor; the prefill kernel has
    no use for it. `max_registers` bounds the registers of a thread (0: the compiler's choice), so that more programs
    share a multiprocessor. `described` lets the copy engine read tiles that lie within one block (prefill only).
    """

    block_rows: int
    block_tokens: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 4
    max_registers: int = 0
    described: bool = False


@dataclass(frozen=True)
class ShapeClass:
    """What launch parameters depend on. Head dimensions are padded to powers of two, `rows` too; sizes in bytes.

    `crowded` says that without a split there would be a program for every second multiprocessor at least.
    """

    kernel: Literal["split", "prefill"]
    element_bytes: int
    kv_bytes: int
    key_dim: int
    value_dim: int
    rows: int
    block_size: int
    crowded: bool = True

    @property
    def key(self) -> str:
        return (
            f"{self.kernel} q{self.element_bytes} kv{self.kv_bytes} dim{self.key_dim}x{self.value_dim} "
            f"rows{self.rows} block{self.block_size}{'' if self.crowded else ' few'}"
        )


def default_launch(shape: ShapeClass) -> Launch:
    """Parameters that fit any device with 227 KB of shared memory, good on an H200."""
    widest = max(shape.key_dim, shape.value_dim)
    if shape.element_bytes == 4:
        return Launch(min(shape.rows, 32), 32, 4, 2)
    if shape.kernel == "split":
        return _default_split(shape, widest)
    if shape.kv_bytes == 1:
        return Launch(128, 64, 8, 3 if widest <= 128 else 2)
    if widest > 128:
        return Launch(128, 64, 8, 2)
    if widest <= 64:
        return Launch(128, 64, 4, 3)
    described = shape.block_size % 64 == 0
    return Launch(128, 64, 8, 2, max_registers=128, described=described)


def _default_split(shape: ShapeClass, widest: int) -> Launch:
    """Enough tiles in flight to cover the latency of memory, enough programs to keep every multiprocessor busy."""
    if shape.kv_bytes == 1:
        return _default_quantized(shape)
    if widest > 128:
        return Launch(shape.rows, 32, 4, 3, 2)
    if shape.rows > 16:
        return Launch(shape.rows, 64, 8 if shape.rows >= 128 else 4, 3, 2)
    if widest <= 64:
        return Launch(shape.rows, 128, 4, 2, 4)
    return Launch(shape.rows, 64, 4, 4, 2) if shape.crowded else Launch(shape.rows, 128, 8, 3, 1)


def _default_quantized(shape: ShapeClass) -> Launch:
    if shape.rows > 16:
        return Launch(shape.rows, 64, 4, 3, 2)
    return Launch(16, 64, 2, 3, 8, 200) if shape.crowded else Launch(16, 128, 4, 3, 2)


def candidates(shape: ShapeClass) -> Iterator[Launch]:
    """What `tune` tries: every combination that fits into shared memory."""
    prefill = shape.kernel == "prefill"
    rows = (64, 128) if prefill else (shape.rows,)
    aims = (1,) if prefill else (2, 4, 8)
    registers = (0, 128) if prefill else (0,)
    described = (False, True) if prefill and shape.kv_bytes == 2 else (False,)
    for block_rows, tokens, warps, stages in itertools.product(rows, (32, 64, 128), (2, 4, 8), (2, 3, 4)):
        per_token = shape.kv_bytes * (shape.key_dim + shape.value_dim)
        if tokens * per_token * stages + block_rows * shape.key_dim * shape.element_bytes > _SHARED_BYTES:
            continue
        for aim, limit, copy in itertools.product(aims, registers, described):
            yield Launch(block_rows, tokens, warps, stages, aim, limit, copy)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a small number elsewhere, where kernels are only interpreted."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one that it depends on drains (compute capability 9.0)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def converts_fp8(device: torch.device) -> bool:
    """Whether the device has instructions for e4m3 (compute capability 8.9); assumed when compiling for none."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def machine_name(device: torch.device) -> str:
    """Names the file of measured parameters: device, its size, and the compiler that they were measured with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    text = f"{name}-{num_multiprocessors(device)}sm-triton{triton.__version__}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)


class LaunchTable:
    """Measured launch parameters of one machine, read once, kept in `directory/attention-<machine>.json`."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.path = directory / f"attention-{machine_name(device)}.json"
        self._launches: dict[ShapeClass, Launch] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self._entries = json.loads(self.path.read_text())

    def find(self, shape: ShapeClass) -> Launch:
        """The measured parameters of a shape class, its defaults when it was never measured."""
        launch = self._launches.get(shape)
        if launch is None:
            entry = self._entries.get(shape.key)
            launch = Launch(**entry["launch"]) if entry else default_launch(shape)
            self._launches[shape] = launch
        return launch

    def store(self, shape: ShapeClass, launch: Launch, seconds: float) -> None:
        """Remember the best parameters and their time; the file is replaced in one piece."""
        self._launches[shape] = launch
        self._entries[shape.key] = {"launch": asdict(launch), "seconds": seconds}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump(self._entries, file, indent=1, sort_keys=True)
        os.replace(temporary, self.path)


def tune(
    shape: ShapeClass,
    run: Callable[[Launch], object],
    table: LaunchTable,
    *,
    among: Iterable[Launch] | None = None,
    measure: Callable[[Callable[[], object]], float] | None = None,
) -> Launch:
    """Measure `run(launch)` for each candidate, store the fastest and return it.

    `run` launches the kernel once; `measure` returns seconds (default: the median of `triton.testing.do_bench`).
    Candidates that the device has no resources for are skipped; raises `RuntimeError` when none is left.
    """
    timed = [
        (seconds, launch)
        for launch in (candidates(shape) if among is None else among)
        if (seconds := _seconds(run, launch, measure or _median_seconds)) is not None
    ]
    if not timed:
        raise RuntimeError(f"no launch parameters work for {shape.key}")
    seconds, best = min(timed, key=lambda pair: pair[0])
    table.store(shape, best, seconds)
    return best


def _seconds(
    run: Callable[[Launch], object], launch: Launch, measure: Callable[[Callable[[], object]], float]
) -> float | None:
    try:
        return measure(lambda: run(launch))
    except triton.runtime.errors.OutOfResources:
        return None


def _median_seconds(call: Callable[[], object]) -> float:
    return triton.testing.do_bench(call, warmup=5, rep=30, return_mode="median") / 1e3
