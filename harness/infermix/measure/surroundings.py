"""What the machine did to us while a repeat ran: waiting for a core, swapping, throttling, company on the device."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from infermix.measure import nvml
from infermix.measure.clock import Clock, SystemClock

THREADS = Path("/proc/self/task")
THERMAL = "sys/devices/system/cpu/cpu*/thermal_throttle/core_throttle_count"


class Watch:
    """Reads cumulative counters when made and when finished; nothing runs in between.

    `own_pids` are the processes that may use the device without being company (default: this process).
    """

    def __init__(self, device: str, *, own_pids: Iterable[int] | None = None, clock: Clock | None = None) -> None:
        self._device, self._clock = device, clock or SystemClock()
        self._own_pids = frozenset(own_pids or {os.getpid()})
        self._throttled, self._nvml_error = self._read_throttled()
        self._swap_bytes, self._thermal_events = _swap_bytes(), _thermal_events()
        self._threads = _thread_times()
        self._start_ns = self._clock.now_ns()

    def finish(self) -> dict[str, Any]:
        """Plain data for `Repeat.environment`.

        - `cpu_wait_share`: share of the time in which our threads were runnable but had no core.
        - `cpu_run_s`: core seconds that our threads got. `load_average` (1 minute) over `num_cores` usable ones.
        - `swap_bytes`: grown swap of this process plus swap traffic of the machine. `thermal_events` of the cores.
        - with CUDA: `throttled_share` per policy, `sm_clock_mhz`, `temperature_c`, `power_w`, `other_processes`, or
          `nvml_error`.

        What the system does not tell is left out.
        """
        window_ns = max(1, self._clock.now_ns() - self._start_ns)
        result: dict[str, Any] = {"load_average": os.getloadavg()[0], "num_cores": usable_cores()}
        result.update(_cpu_shares(self._threads, _thread_times()))
        result["swap_bytes"] = max(0, _swap_bytes() - self._swap_bytes)
        result["thermal_events"] = max(0, _thermal_events() - self._thermal_events)
        if self._device.startswith("cuda"):
            result.update(self._device_facts(window_ns))
        return result

    def _read_throttled(self) -> tuple[dict[str, int], str]:
        if not self._device.startswith("cuda"):
            return {}, ""
        import pynvml

        try:
            return nvml.throttled_ns(self._device), ""
        except pynvml.NVMLError as error:
            return {}, str(error)

    def _device_facts(self, window_ns: int) -> dict[str, Any]:
        throttled, error = self._read_throttled()
        if error or self._nvml_error:
            return {"nvml_error": error or self._nvml_error}
        grown = {name: throttled[name] - before for name, before in self._throttled.items()}
        shares = {name: min(1.0, max(0, value) / window_ns) for name, value in grown.items()}
        return {"throttled_share": shares, **nvml.device_state(self._device, self._own_pids)}


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _thread_times() -> dict[int, tuple[int, int]]:
    """Per thread: nanoseconds on a core, and runnable without one. Empty where the kernel does not count."""
    times = {}
    for path in THREADS.glob("*/schedstat"):
        try:
            run, wait, _ = path.read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            continue
        times[int(path.parent.name)] = (int(run), int(wait))
    return times


def _cpu_shares(before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]) -> dict[str, float]:
    if not after:
        return {}
    run = wait = 0
    for thread, (run_ns, wait_ns) in after.items():
        earlier = before.get(thread, (0, 0))
        run += run_ns - earlier[0]
        wait += wait_ns - earlier[1]
    return {"cpu_run_s": run / 1e9, "cpu_wait_share": wait / max(1, run + wait)}


def _swap_bytes() -> int:
    traffic = psutil.swap_memory()
    return _own_swap_bytes() + traffic.sin + traffic.sout


def _own_swap_bytes() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSwap:")), 0)


def _thermal_events() -> int:
    return sum(int(path.read_text()) for path in Path("/").glob(THERMAL))
