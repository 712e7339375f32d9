"""The limits of this machine: bytes/s of a copy, FLOP/s of a matmul. torch is imported only inside functions."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from infermix.measure.clock import now_ns, utc_stamp
from infermix.roles.facts import Ceilings

if TYPE_CHECKING:
    import torch

_REPEATS = 7
#: float16 products are emulated on many CPUs.
_SLOW_S = 1.0
#: (bytes copied, side of the square matmul, dtypes) per kind of device.
_SIZES: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "cuda": (1 << 30, 8192, ("bfloat16", "float16", "float32")),
    "cpu": (1 << 28, 1024, ("float32", "bfloat16", "float16")),
}


def measure_ceilings(device: str, num_threads: int | None = None) -> Ceilings:
    """Takes some seconds. Random data; the copy counts bytes read and written.

    On a GPU the median of repeats counts. On a CPU the best does, as other processes only ever slow it down, and
    plain reads stand in for the copy where they are faster: there a write fetches its line first, uncounted.
    `num_threads` bounds the CPU threads (all usable ones by default) and is put back afterwards. float32 products
    are computed in full float32 (no TF32), as the cells compute them.
    """
    import torch

    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        return _measure(torch, device)
    finally:
        torch.set_num_threads(before)


def _measure(torch: Any, device: str) -> Ceilings:
    copy_bytes, side, dtypes = _SIZES[device.partition(":")[0]]
    timer = _time_on_device if device.startswith("cuda") else _time_on_host
    rates = {}
    for name in dtypes:
        if device.startswith("cuda") and name == "bfloat16" and not torch.cuda.is_bf16_supported():
            continue
        rates[name] = _matmul_flops_per_s(torch, device, getattr(torch, name), side, timer)
    return Ceilings(
        copy_bytes_per_s=_copy_bytes_per_s(torch, device, copy_bytes, timer),
        matmul_flops_per_s=rates,
        measured_at=utc_stamp(),
    )


def _copy_bytes_per_s(torch: Any, device: str, size: int, timer: Callable[..., float]) -> float:
    # random bits: some memory systems compress zeros
    source = torch.randint(-(1 << 62), 1 << 62, (size // 8,), dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    copied = 2 * size / timer(lambda: target.copy_(source), device)
    if device.startswith("cuda"):
        return copied
    return max(copied, size / timer(lambda: source.sum(), device))


def _matmul_flops_per_s(torch: Any, device: str, dtype: torch.dtype, side: int, timer: Callable[..., float]) -> float:
    left = torch.randn(side, side, dtype=torch.float32, device=device).to(dtype)
    right = torch.randn(side, side, dtype=torch.float32, device=device).to(dtype)
    out = torch.empty_like(left)
    return 2 * side**3 / timer(lambda: torch.mm(left, right, out=out), device)


def _time_on_host(work: Callable[[], Any], device: str) -> float:
    """Seconds of one call, the best of several; one that is too slow is not repeated."""
    first = _seconds(work)
    if first > _SLOW_S:
        return first
    return min(_seconds(work) for _ in range(_REPEATS))


def _seconds(work: Callable[[], Any]) -> float:
    started = now_ns()
    work()
    return (now_ns() - started) / 1e9


def _time_on_device(work: Callable[[], Any], device: str, calls: int = 10) -> float:
    """Seconds of one call by device events, median over bursts of `calls`."""
    import torch

    times = []
    with torch.cuda.device(device):
        for _ in range(_REPEATS + 2):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            for _ in range(calls):
                work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3 / calls)
    return statistics.median(times[2:])
