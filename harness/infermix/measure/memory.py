"""Peak memory per phase of a cell."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
SAMPLE_S = 0.02


class _Meter(Protocol):
    method: str

    def start(self) -> None: ...

    def peaks(self) -> dict[str, int]:
        """Suffix -> bytes since `start`; the empty suffix is the headline."""
        ...


class MemoryMeter:
    """Peaks of one phase at a time: `with meter.phase("setup"): ...`, then `figures()`.

    On CUDA a peak is what torch's allocator handed out; `_reserved` is what it held, `_process` what NVML shows for
    the process at the end of the phase (CUDA context and other libraries included). On the CPU it is the resident
    set of the process. `method` says how it was read.
    """

    def __init__(self, device: str) -> None:
        self._meter = _make_meter(device)
        self._peaks: dict[str, float] = {}
        self._open: str | None = None

    @property
    def method(self) -> str:
        return self._meter.method

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase; a phase that comes again keeps its highest peak. Phases do not nest."""
        assert self._open is None, f"phase {self._open} is still open"
        self._open = name
        self._meter.start()
        try:
            yield
        finally:
            self._open = None
            for suffix, value in self._meter.peaks().items():
                key = f"peak_{name}{suffix}_bytes"
                self._peaks[key] = max(value, self._peaks.get(key, 0))

    def figures(self) -> dict[str, float]:
        """`peak_<phase>_bytes` of every finished phase, and `peak_<phase>_reserved_bytes` and so on."""
        return dict(self._peaks)


def _make_meter(device: str) -> _Meter:
    if device.startswith("cuda"):
        return _CudaMeter(device)
    return _HighWaterMeter() if _can_reset_high_water() else _SamplingMeter()


class _CudaMeter:
    method = "torch allocator peaks; NVML process memory at the end of the phase"

    def __init__(self, device: str) -> None:
        import torch

        self._device, self._cuda = torch.device(device), torch.cuda

    def start(self) -> None:
        self._cuda.synchronize(self._device)
        self._cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> dict[str, int]:
        self._cuda.synchronize(self._device)
        found = {
            "": self._cuda.max_memory_allocated(self._device),
            "_reserved": self._cuda.max_memory_reserved(self._device),
        }
        process = self._process_bytes()
        return found if process is None else {**found, "_process": process}

    def _process_bytes(self) -> int | None:
        import pynvml

        from infermix.measure.nvml import process_bytes

        try:
            return process_bytes(str(self._device), os.getpid())
        except pynvml.NVMLError:
            return None


class _HighWaterMeter:
    method = "VmHWM of /proc/self/status, reset before each phase"

    def start(self) -> None:
        CLEAR_REFS.write_text("5")

    def peaks(self) -> dict[str, int]:
        return {"": _high_water_bytes()}


def _high_water_bytes() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _can_reset_high_water() -> bool:
    try:
        CLEAR_REFS.write_text("5")
        _high_water_bytes()
    except (OSError, StopIteration):
        return False
    return True


class _SamplingMeter:
    """For systems whose high-water mark cannot be reset: short peaks between two samples are missed."""

    method = f"resident set, sampled every {SAMPLE_S * 1000:.0f} ms"

    def __init__(self) -> None:
        self._process = psutil.Process()

    def start(self) -> None:
        self._peak, self._stop = self._rss(), threading.Event()
        self._thread = threading.Thread(target=self._sample, name="infermix-memory", daemon=True)
        self._thread.start()

    def peaks(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join()
        return {"": max(self._peak, self._rss())}

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._peak = max(self._peak, self._rss())

    def _rss(self) -> int:
        return int(self._process.memory_info().rss)
