"""Small operators: many rows against the copy bandwidth, one row against launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from infermix_kernels import activation, kv_write, norm, quantize
from infermix_kernels.reference import ops as meant
from infermix_kernels.rotary import RotaryTable, rotary
from kernel_timing import DEVICE, DTYPE, GPU, Ceilings, Goal, Sheet, flushed_seconds, graph_seconds, relative_error
from torch import Tensor

ROWS, WIDTH, WIDE, HEADS, KV_HEADS, DIM = (16384, 4096, 14336, 32, 8, 128) if GPU else (6, 64, 96, 4, 2, 16)
ROW_COPIES = 16 if GPU else 2
#: Kernels of a decode layer besides linears and attention.
LAYER = ("add_rms_norm", "rotary+write_kv", "add_rms_norm", "silu_and_mul")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


class Operator:
    """A call, the bytes that it moves, and its error against fp32."""

    def __init__(self, call: Callable[[], object], num_bytes: int, error: Callable[[], float]) -> None:
        self.call, self.num_bytes, self.error = call, num_bytes, error


def operators(rows: int, pdl: bool) -> dict[str, Operator]:
    x, residual, weight, packed = normal(rows, WIDTH), normal(rows, WIDTH), normal(WIDTH), normal(rows, 2 * WIDE)
    out, new, hidden = torch.empty_like(x), torch.empty_like(x), normal(rows, WIDE)
    heads = normal(rows, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = heads[:, :HEADS], heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]
    q_out, k_out = normal(rows, HEADS, DIM), normal(rows, KV_HEADS, DIM)
    angles = torch.rand(8192, DIM // 2, device=DEVICE)
    table = RotaryTable(angles.cos().to(DTYPE), angles.sin().to(DTYPE))
    positions = torch.randint(0, 8192, (rows,), device=DEVICE)
    slots = torch.randperm(rows, device=DEVICE)
    pools = [normal(rows // 16 + 1, 16, KV_HEADS, DIM) for _ in range(2)]
    numbers = torch.empty(rows, WIDTH, device=DEVICE, dtype=torch.int8)
    scales = torch.empty(rows, device=DEVICE)
    store: dict[str, Any] = {"table": table, "positions": positions, "q": q, "q_out": q_out, "pdl": pdl}

    def norm_error() -> float:
        norm.add_rms_norm(x, residual, weight, 1e-5, out=out, residual_out=new)
        return relative_error(out, meant.add_rms_norm(x, residual, weight, 1e-5)[0])

    def rotary_error() -> float:
        rotary(q, k, table, positions, q_out=q_out, k_out=k_out)
        return relative_error(q_out, meant.rotate(q.float(), table.cos, table.sin, positions))

    def write_error() -> float:
        kv_write.write_kv(k, v, pools[0], pools[1], slots, **store)
        stored = pools[0].flatten(0, 1)[slots]
        return relative_error(stored, meant.rotate(k.float(), table.cos, table.sin, positions))

    def silu_error() -> float:
        activation.silu_and_mul(packed, out=hidden)
        return relative_error(hidden[:256], meant.silu_and_mul(packed[:256].float()))

    def quantize_error() -> float:
        quantize.quantize_rows(x, torch.int8, out=numbers, scales=scales)
        return relative_error(numbers.float() * scales[:, None], x)

    size = x.element_size()
    return {
        "rms_norm": Operator(
            lambda: norm.rms_norm(x, weight, 1e-5, out=out, pdl=pdl), 2 * x.numel() * size,
            lambda: relative_error(norm.rms_norm(x, weight, 1e-5), meant.rms_norm(x.float(), weight, 1e-5)),
        ),
        "add_rms_norm": Operator(
            lambda: norm.add_rms_norm(x, residual, weight, 1e-5, out=out, residual_out=new, pdl=pdl),
            4 * x.numel() * size, norm_error,
        ),
        "silu_and_mul": Operator(
            lambda: activation.silu_and_mul(packed, out=hidden, pdl=pdl), 3 * hidden.numel() * size, silu_error
        ),
        "rotary": Operator(
            lambda: rotary(q, k, table, positions, q_out=q_out, k_out=k_out, pdl=pdl),
            2 * rows * (HEADS + KV_HEADS) * DIM * size, rotary_error,
        ),
        "rotary+write_kv": Operator(
            lambda: kv_write.write_kv(k, v, pools[0], pools[1], slots, **store),
            2 * rows * (HEADS + 2 * KV_HEADS) * DIM * size, write_error,
        ),
        "quantize_rows": Operator(
            lambda: quantize.quantize_rows(x, torch.int8, out=numbers, scales=scales, pdl=pdl),
            x.numel() * (size + 1), quantize_error,
        ),
    }  # fmt: skip


def many_rows(sheet: Sheet, limits: Ceilings) -> None:
    names = [name for name in operators(1, False) if sheet.wants(f"small {name} rows={ROWS}")]
    if not names:
        return
    made = operators(ROWS, False)
    for name in names:
        operator = made[name]

        def measure(operator: Operator = operator) -> tuple[float, float]:
            error = operator.error()
            return operator.num_bytes / flushed_seconds(operator.call) / 1e9, error

        goal = Goal("GB/s", True, target=0.85, over=limits.copy / 1e9)
        sheet.add(f"small {name} rows={ROWS}", "ours", goal, measure, ours=True, ceiling=limits.copy / 1e9)


def one_row(sheet: Sheet) -> None:
    """A decode layer's kernels besides linears and attention, dependent on each other, in a graph."""
    row = "one row: norms, KV write, activation"
    for pdl in (False, True) if GPU else (False,):
        made = operators(1, pdl) if sheet.wants(row) else {}

        def layer(made: dict[str, Operator] = made) -> tuple[float, float]:
            error = max(made[name].error() for name in LAYER)
            return graph_seconds([made[name].call for name in LAYER] * ROW_COPIES) * len(LAYER) * 1e6, error

        label = "ours, early starts" if pdl else "ours"
        goal = Goal("us/layer", False, target=8.0)
        sheet.add(row, label, goal, layer, ours=True)
    launches = Goal("launches", False, target=6.0, stretch=4.0)
    sheet.add("one row: launches a layer besides linears", "ours", launches, _count_launches, ours=True)


def _count_launches() -> tuple[float, None]:
    """Kernels that a layer's calls put into a graph, attention (with its combination) included."""
    from kernel_attention import decode_launches

    made = operators(1, False)
    return float(sum(launches_of(made[name].call) for name in LAYER) + decode_launches()), None


def launches_of(call: Callable[[], object]) -> int:
    """Kernels on the device during one call, as the profiler sees them."""
    call()
    if not GPU:
        return 1
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    count = sum(event.count for event in seen.key_averages() if event.device_type == DeviceType.CUDA)
    if count == 0:
        raise RuntimeError("the profiler saw no kernel")
    return count
