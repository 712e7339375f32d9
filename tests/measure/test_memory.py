from __future__ import annotations

import numpy as np
import pytest
from infermix.measure import memory
from infermix.measure.memory import MemoryMeter

MIB = 2**20


@pytest.fixture(params=["high water", "sampling"])
def meter(request, monkeypatch) -> MemoryMeter:
    if request.param == "sampling":
        monkeypatch.setattr(memory, "_can_reset_high_water", lambda: False)
    elif not memory._can_reset_high_water():
        pytest.skip("the high-water mark cannot be reset here")
    return MemoryMeter("cpu")


def test_each_phase_has_its_own_peak(meter: MemoryMeter) -> None:
    import gc
    import time

    gc.collect()  # what earlier tests left must not be freed between the phases
    with meter.phase("setup"):
        block = np.ones(256 * MIB, dtype=np.uint8)
        time.sleep(0.1)
        del block
    with meter.phase("measure"):
        pass
    peaks = meter.figures()
    assert set(peaks) == {"peak_setup_bytes", "peak_measure_bytes"}
    assert peaks["peak_setup_bytes"] - peaks["peak_measure_bytes"] == pytest.approx(256 * MIB, rel=0.1)
    assert meter.method


def test_a_phase_that_comes_again_keeps_its_highest_peak() -> None:
    meter = MemoryMeter("cpu")
    with meter.phase("measure"):
        block = np.ones(128 * MIB, dtype=np.uint8)
        del block
    first = meter.figures()["peak_measure_bytes"]
    with meter.phase("measure"):
        pass
    assert meter.figures()["peak_measure_bytes"] == first


def test_a_phase_that_fails_is_kept_and_closed() -> None:
    meter = MemoryMeter("cpu")
    with pytest.raises(RuntimeError), meter.phase("setup"):
        raise RuntimeError
    with meter.phase("measure"):
        pass
    assert set(meter.figures()) == {"peak_setup_bytes", "peak_measure_bytes"}


def test_phases_do_not_nest() -> None:
    meter = MemoryMeter("cpu")
    with meter.phase("a"), pytest.raises(AssertionError, match="phase a is still open"), meter.phase("b"):
        pass


@pytest.mark.gpu
def test_cuda_peaks() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    meter = MemoryMeter("cuda")
    with meter.phase("setup"):
        block = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        del block
    with meter.phase("measure"):
        pass
    peaks = meter.figures()
    assert peaks["peak_setup_bytes"] - peaks["peak_measure_bytes"] == 256 * MIB
    assert peaks["peak_setup_reserved_bytes"] >= 256 * MIB
