"""The environment that a record was made in: versions, machine, load, clocks. No user name, host name or
path.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infermix.roles.facts import MachineFacts

PACKAGES = ("infermix", "torch", "transformers", "triton", "safetensors", "tokenizers", "gguf", "numpy")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def capture_environment(
    machine: MachineFacts, device: str | None = None, distributions: Iterable[str] = ()
) -> dict[str, Any]:
    """Plain data for `Record.environment`; imports no torch (thread counts of torch appear if it is
    loaded).

    `device` defaults to the machine's. `distributions` adds packages, e.g. those of the chosen components;
    the ones that register InferMix plugins are always included.
    """
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count() or 0,
        "machine": _machine(machine),
        "packages": package_versions(distributions),
        "load_average": _load_average(),
        "threads": _threads(),
        "git": git_state(),
    }
    if (device or machine.device).startswith("cuda"):
        environment["gpu"] = gpu_state()
    return environment


def package_versions(extra: Iterable[str] = ()) -> dict[str, str]:
    """Installed versions of the packages that decide what runs; absent ones are left out."""
    plugins = (point.dist.name for point in importlib.metadata.entry_points(group="infermix") if point.dist)
    versions = {}
    for name in sorted({*PACKAGES, *plugins, *extra}):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_state() -> dict[str, Any]:
    """Commit of the checkout that this package runs from, and whether its code was edited; empty when
    installed.

    A repository that merely contains the virtual environment is not ours and is not reported.
    """
    package = Path(__file__).resolve().parents[1]
    top = _git(package, "rev-parse", "--show-toplevel")
    if not top or package != Path(top).resolve() / "harness" / "infermix":
        return {}
    edited = _git(Path(top), "status", "--porcelain", "--untracked-files=no", "--", "harness", "kernels", "plugins")
    return {"commit": _git(package, "rev-parse", "HEAD"), "edited": bool(edited)}


def gpu_state(index: int | None = None) -> dict[str, Any]:
    """Name, driver, clocks, power and throttle reasons through NVML; `{"error": reason}` when NVML does not
    answer.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"error": str(error)}
    try:
        return _nvml_state(pynvml, _visible_index() if index is None else index)
    except pynvml.NVMLError as error:
        return {"error": str(error)}
    finally:
        pynvml.nvmlShutdown()


def cpu_name() -> str:
    """The processor's model name; the architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _machine(machine: MachineFacts) -> dict[str, Any]:
    return {
        "name": machine.name,
        "fingerprint": machine.fingerprint,
        "memory_bytes": machine.memory_bytes,
        "num_cores": machine.num_cores,
        "compute_capability": machine.compute_capability,
        "copy_bytes_per_s": machine.ceilings.copy_bytes_per_s,
        "matmul_flops_per_s": dict(machine.ceilings.matmul_flops_per_s),
    }


def _load_average() -> list[float] | None:
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except OSError:
        return None


def _threads() -> dict[str, Any]:
    threads: dict[str, Any] = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    torch = sys.modules.get("torch")
    if torch is not None:
        threads["torch"] = torch.get_num_threads()
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity is not None:
        threads["usable_cores"] = len(affinity(0))
    return threads


def _git(folder: Path, *arguments: str) -> str:
    """Output of one git command; empty when git or the repository is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _visible_index() -> int:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _nvml_state(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return {
        "name": nvml.nvmlDeviceGetName(handle),
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "cuda_driver": nvml.nvmlSystemGetCudaDriverVersion_v2(),
        "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }
