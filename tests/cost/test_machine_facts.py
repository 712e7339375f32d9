"""Machine facts and stored ceilings, with a stand-in for NVML."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from infermix.cost.machine import machine_facts, store_ceilings, stored_ceilings
from infermix.errors import UserError
from infermix.measure import ceilings as measured
from infermix.roles.facts import Ceilings

GPUS = [("Big GPU", 150 << 30, (9, 0)), ("Old GPU", 16 << 30, (7, 5))]


class _NvmlError(Exception):
    pass


def _fake_nvml(gpus: list[tuple[str, int, tuple[int, int]]], *, works: bool = True) -> Any:
    def start() -> None:
        if not works:
            raise _NvmlError("library not found")

    return SimpleNamespace(
        NVMLError=_NvmlError,
        nvmlInit=start,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetHandleByUUID=lambda uuid: gpus[int(uuid[-1])],
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetName=lambda gpu: gpu[0],
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=gpu[1]),
        nvmlDeviceGetCudaComputeCapability=lambda gpu: gpu[2],
    )


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(
        gpus: list[tuple[str, int, tuple[int, int]]], *, works: bool = True, visible: str | None = None
    ) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", _fake_nvml(gpus, works=works))
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return install


def test_cpu() -> None:
    facts = machine_facts("cpu")
    assert facts.device == "cpu"
    assert facts.name
    assert facts.memory_bytes > 1 << 30
    assert facts.num_cores >= 1
    assert facts.compute_capability is None
    assert {"device:cpu", "dtype:bfloat16"} <= facts.provides
    assert machine_facts("cpu").fingerprint == facts.fingerprint


def test_cuda(with_gpus: Callable[..., None]) -> None:
    with_gpus(GPUS)
    facts = machine_facts("auto")
    assert (facts.device, facts.name, facts.memory_bytes) == ("cuda", "Big GPU", 150 << 30)
    assert {"device:cuda", "sm:90", "dtype:bfloat16", "dtype:float8_e4m3fn"} <= facts.provides
    assert machine_facts("cuda") == facts
    old = machine_facts("cuda:1")
    assert (old.name, old.compute_capability) == ("Old GPU", 75)
    assert "bfloat16" not in old.dtypes
    assert old.fingerprint != facts.fingerprint


@pytest.mark.parametrize(
    ("visible", "name"), [("1", "Old GPU"), ("1,0", "Old GPU"), ("GPU-1", "Old GPU"), ("0", "Big GPU")]
)
def test_visible_devices(with_gpus: Callable[..., None], visible: str, name: str) -> None:
    with_gpus(GPUS, visible=visible)
    assert machine_facts("cuda").name == name


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_no_visible_device(with_gpus: Callable[..., None], visible: str) -> None:
    with_gpus(GPUS, visible=visible)
    assert machine_facts("auto").device == "cpu"
    with pytest.raises(UserError, match="no device cuda"):
        machine_facts("cuda")


def test_devices_that_are_not_there(with_gpus: Callable[..., None]) -> None:
    with_gpus(GPUS)
    with pytest.raises(UserError, match="NVML shows 2"):
        machine_facts("cuda:2")
    for wrong in ("gpu", "cuda:x", "cpu:0", "auto:1", "tpu"):
        with pytest.raises(UserError, match="unknown device"):
            machine_facts(wrong)
    with_gpus([], works=False)
    assert machine_facts("auto").device == "cpu"
    with pytest.raises(UserError, match="NVML shows no GPU"):
        machine_facts("cuda")


def test_ceilings_are_kept(with_gpus: Callable[..., None]) -> None:
    with_gpus([("GPU of this test", 1 << 30, (8, 0))])
    facts = machine_facts("cuda")
    assert facts.ceilings == Ceilings()
    ceilings = Ceilings(4.28e12, {"bfloat16": 6.85e14}, "2026-01-01T00:00:00+00:00")
    path = store_ceilings(facts, ceilings)
    assert machine_facts("cuda").ceilings == ceilings
    assert stored_ceilings(facts.fingerprint) == ceilings
    path.write_text("{}")
    with pytest.raises(UserError, match="no measured ceilings") as caught:
        machine_facts("cuda")
    assert caught.value.where == str(path)


def test_measuring_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(measured, "_SIZES", {"cpu": (1 << 20, 64, ("float32", "bfloat16"))})
    before = torch.get_num_threads()
    found = measured.measure_ceilings("cpu", num_threads=1)
    assert torch.get_num_threads() == before
    assert found.copy_bytes_per_s is not None
    assert found.copy_bytes_per_s > 1e6
    assert set(found.matmul_flops_per_s) == {"float32", "bfloat16"}
    assert min(found.matmul_flops_per_s.values()) > 1e4
    assert found.measured_at.endswith("Z")
