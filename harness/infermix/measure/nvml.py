"""What NVML tells about the device of a cell: cumulative throttling, clocks, processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

#: NVML performance policies whose violation time is cumulative, in nanoseconds.
POLICIES = {
    "power": "NVML_PERF_POLICY_POWER",
    "thermal": "NVML_PERF_POLICY_THERMAL",
    "reliability": "NVML_PERF_POLICY_RELIABILITY",
}


@contextmanager
def nvml_device(device: str) -> Iterator[tuple[Any, Any]]:
    """The NVML module and the handle of a torch device (`cuda`, `cuda:1`). Raises `pynvml.NVMLError`."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml, _handle(pynvml, int(device.partition(":")[2] or 0))
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, index: int) -> Any:
    """The handle by UUID when torch knows the device, since a mask of visible devices renumbers them."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is not None:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    visible = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    chosen = visible[index] if index < len(visible) else str(index)
    if chosen.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(chosen))
    return nvml.nvmlDeviceGetHandleByUUID(chosen)


def throttled_ns(device: str) -> dict[str, int]:
    """Cumulative time under each policy's cap; policies that the device does not count are left out."""
    times = {}
    with nvml_device(device) as (nvml, handle):
        for name, constant in POLICIES.items():
            try:
                status = nvml.nvmlDeviceGetViolationStatus(handle, getattr(nvml, constant))
            except nvml.NVMLError_NotSupported:
                continue
            times[name] = int(status.violationTime)
    return times


def device_state(device: str, own_pids: Iterable[int]) -> dict[str, Any]:
    """Clocks, temperature, power, and how many compute processes are not ours."""
    with nvml_device(device) as (nvml, handle):
        pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        return {
            "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "other_processes": count_others(pids, own_pids),
        }


def count_others(pids: Iterable[int], own_pids: Iterable[int]) -> int:
    """Processes that are not ours. Inside a container NVML may show host ids: then one of them is taken for ours."""
    seen, own = set(pids), set(own_pids)
    return len(seen - own) if seen & own else max(0, len(seen) - 1)


def process_bytes(device: str, pid: int) -> int | None:
    """Device memory of one process; `None` where NVML does not tell (containers, some drivers)."""
    with nvml_device(device) as (nvml, handle):
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == pid and process.usedGpuMemory:
                return int(process.usedGpuMemory)
    return None
