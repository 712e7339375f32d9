"""What this machine has, from the system and NVML: no torch, no CUDA context."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from infermix.cost.header_cache import write_atomically
from infermix.errors import UserError
from infermix.paths import cache_dir
from infermix.roles.facts import Ceilings, MachineFacts

_GIB = 1 << 30


@dataclass(frozen=True)
class _Gpu:
    name: str
    memory_bytes: int
    compute_capability: int
    driver: str


def machine_facts(device: str = "auto") -> MachineFacts:
    """Facts of `cpu`, `cuda`, `cuda:N`, or of what `auto` finds: the first GPU that NVML shows, else the CPU.

    Raises `UserError` for a device that this machine does not have or that nobody knows.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
        raise UserError(f"unknown device {device!r}", key="device", hint="auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return _cpu()
    gpus = _gpus()
    if kind == "auto":
        return _cuda("cuda", gpus[0]) if gpus else _cpu()
    number = int(index or 0)
    if number >= len(gpus):
        found = f"NVML shows {len(gpus)}" if gpus else "NVML shows no GPU"
        raise UserError(f"this machine has no device {device}: {found}", key="device", hint="device: cpu or auto")
    return _cuda(device, gpus[number])


def store_ceilings(facts: MachineFacts, ceilings: Ceilings) -> Path:
    """Keep measured ceilings for every later run on an equal machine; returns the file."""
    path = _ceilings_file(facts.fingerprint)
    write_atomically(path, json.dumps({"machine": facts.name, **asdict(ceilings)}, indent=2) + "\n")
    return path


def stored_ceilings(fingerprint: str) -> Ceilings:
    """What was measured on this machine; empty when nothing was. Raises `UserError` for a broken file."""
    path = _ceilings_file(fingerprint)
    if not path.is_file():
        return Ceilings()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rates = {str(dtype): float(rate) for dtype, rate in data["matmul_flops_per_s"].items()}
        return Ceilings(float(data["copy_bytes_per_s"]), rates, str(data["measured_at"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        hint = "delete it and run `infermix doctor --measure`"
        raise UserError("holds no measured ceilings", where=str(path), hint=hint) from None


def _ceilings_file(fingerprint: str) -> Path:
    return cache_dir("ceilings") / f"{fingerprint}.json"


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def _cpu() -> MachineFacts:
    name, memory, cores = _cpu_name(), psutil.virtual_memory().total, _usable_cores()
    # rounded: the kernel's own share of RAM changes between boots
    fingerprint = _fingerprint("cpu", name, round(memory / _GIB), cores)
    return MachineFacts(
        device="cpu",
        name=name,
        memory_bytes=memory,
        num_cores=cores,
        ceilings=stored_ceilings(fingerprint),
        fingerprint=fingerprint,
    )


def _cuda(device: str, gpu: _Gpu) -> MachineFacts:
    fingerprint = _fingerprint("cuda", gpu.name, gpu.memory_bytes, gpu.compute_capability, gpu.driver)
    return MachineFacts(
        device="cuda",
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        num_cores=_usable_cores(),
        compute_capability=gpu.compute_capability,
        dtypes=_cuda_dtypes(gpu.compute_capability),
        ceilings=stored_ceilings(fingerprint),
        fingerprint=fingerprint,
    )


def _cuda_dtypes(capability: int) -> frozenset[str]:
    dtypes = {"float32", "float16"}
    if capability >= 80:
        dtypes.add("bfloat16")
    if capability >= 89:
        dtypes.add("float8_e4m3fn")
    return frozenset(dtypes)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _gpus() -> list[_Gpu]:
    """GPUs in the order in which CUDA numbers them here; empty without NVML."""
    try:
        import pynvml
    except ImportError:
        return []
    with _nvml(pynvml) as ready:
        if not ready:
            return []
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return [_gpu(pynvml, handle, driver) for handle in _visible_handles(pynvml)]


@contextmanager
def _nvml(pynvml: Any) -> Iterator[bool]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _visible_handles(pynvml: Any) -> list[Any]:
    """Handles that `CUDA_VISIBLE_DEVICES` leaves; like CUDA, stop at the first entry that names no device."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return handles
    chosen = []
    for entry in filter(None, (part.strip() for part in mask.split(","))):
        if entry.isdigit() and int(entry) < len(handles):
            chosen.append(handles[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")):
            chosen.append(pynvml.nvmlDeviceGetHandleByUUID(entry))
        else:
            break
    return chosen


def _gpu(pynvml: Any, handle: Any, driver: str) -> _Gpu:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return _Gpu(
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=10 * major + minor,
        driver=driver,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
