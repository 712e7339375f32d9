"""Every operator on a GPU at the shapes of an 8B model: `pytest -m gpu tests/bench/test_ops_bench.py`.

Launches run in CUDA graphs and take turns on more memory than the L2 cache holds. `extra_info` has microseconds per
call (per layer for the linears), GB/s and the fraction of the copy bandwidth measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import itertools

from infermix_kernels import activation, fp8, gemv, greedy, kv_write, norm, quantize, sampling, softmax, w4a16, w8a8
from infermix_kernels.matmul_launch import MatmulWorkspace
from infermix_kernels.pack import PackedW4
from infermix_kernels.rotary import RotaryTable, rotary
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, INT8, FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
#: q/k/v, output, gate/up and down projection: output and input features.
LINEARS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
#: Layers of weights that a graph walks through.
LAYERS = 4
ROWS = 16384


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.fixture(scope="module")
def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
    for mark in marks:
        mark.record()
        target.copy_(source)
    torch.cuda.synchronize()
    times = sorted(first.elapsed_time(second) for first, second in itertools.pairwise(marks))
    return 8 * source.numel() / times[len(times) // 2] * 1e3


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def timed(benchmark: Any, call: Callable[[], object], calls: int, num_bytes: float, bandwidth: float) -> None:
    """`call` makes `calls` calls that move `num_bytes` each."""
    graph = captured(call)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replays = 20
    graph.replay()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    seconds = begin.elapsed_time(end) / 1e3 / replays / calls
    benchmark.extra_info |= {
        "us": round(seconds * 1e6, 2),
        "GB/s": round(num_bytes / seconds / 1e9),
        "of copy": round(num_bytes / seconds / bandwidth, 3),
    }
    benchmark.pedantic(replay, rounds=10, warmup_rounds=1)


def _bf16(n: int, k: int) -> tuple[Any, int]:
    return normal(n, k), 2 * n * k


def _w4(n: int, k: int) -> tuple[Any, int]:
    words = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda")
    weight = PackedW4(words, normal(k // 128, n).abs() / 64, None, k, 128)
    return weight, weight.num_bytes


def _int8(n: int, k: int) -> tuple[Any, int]:
    weight = torch.randint(-127, 128, (n, k), dtype=INT8, device="cuda")
    return (weight, torch.rand(n, device="cuda") / 64), n * k


def _fp8(n: int, k: int) -> tuple[Any, int]:
    return (normal(n, k, dtype=FP8), torch.rand(n, device="cuda") / 64), n * k


def _call(kind: str, x: Tensor, weight: Any, out: Tensor, workspace: MatmulWorkspace, pdl: bool) -> None:
    if kind == "cublas":
        torch.mm(x, weight.t(), out=out)
    elif kind == "bf16":
        gemv.skinny_linear(x, weight, out=out, workspace=workspace, pdl=pdl)
    elif kind == "w4a16":
        w4a16.w4a16_linear(x, weight, out=out, workspace=workspace, pdl=pdl)
    else:
        linear = w8a8.w8a8_linear if kind == "int8" else fp8.fp8_linear
        linear(x, *weight, out=out, workspace=workspace, pdl=pdl)


MAKERS = {"cublas": _bf16, "bf16": _bf16, "w4a16": _w4, "int8": _int8, "fp8": _fp8}
CASES = [
    (kind, rows, early)
    for kind, sizes in {
        "cublas": (1, 2, 4, 8, 16, 64, 512),
        "bf16": (1, 2, 4, 8, 16),
        "w4a16": (1, 8, 16, 64, 512),
        "int8": (1, 8, 64, 512),
        "fp8": (1, 8, 64, 512),
    }.items()
    for rows in sizes
    for early in ((False,) if kind == "cublas" else (False, True))
]


@pytest.mark.parametrize(
    ("kind", "rows", "early"),
    CASES,
    ids=[f"{kind} M={rows}{' early' if early else ''}" for kind, rows, early in CASES],
)
def test_linears_of_a_layer(benchmark: Any, copy_bandwidth: float, kind: str, rows: int, early: bool) -> None:
    """The four linears of a layer one after the other, quantization of x included."""
    weights = [[MAKERS[kind](n, k) for n, k in LINEARS] for _ in range(LAYERS)]
    inputs = [(normal(rows, k), torch.empty(rows, n, dtype=BF16, device="cuda")) for n, k in LINEARS]
    workspace = MatmulWorkspace.allocate("cuda")

    def layers() -> None:
        for layer in weights:
            for (weight, _), (x, out) in zip(layer, inputs, strict=True):
                _call(kind, x, weight, out, workspace, early)

    timed(benchmark, layers, LAYERS, sum(size for _, size in weights[0]), copy_bandwidth)


def _operators(rows: int, pdl: bool) -> dict[str, tuple[Callable[[], object], int]]:
    """Call and bytes moved, at the widths of an 8B model."""
    x, residual, weight = normal(rows, 4096), normal(rows, 4096), normal(4096)
    out, packed, hidden = (
        torch.empty_like(x),
        normal(rows, 28672),
        torch.empty(rows, 14336, device="cuda", dtype=BF16),
    )
    heads, q_out = normal(rows, 48, 128), torch.empty(rows, 32, 128, device="cuda", dtype=BF16)
    q, k, v = heads[:, :32], heads[:, 32:40], heads[:, 40:]
    k_out = torch.empty(rows, 8, 128, device="cuda", dtype=BF16)
    angles = torch.rand(8192, 64, device="cuda")
    table = RotaryTable(angles.cos().to(BF16), angles.sin().to(BF16))
    positions, slots = torch.randint(0, 8192, (rows,), device="cuda"), torch.randperm(rows, device="cuda")
    pools = [torch.zeros(rows // 16 + 1, 16, 8, 128, device="cuda", dtype=BF16) for _ in range(2)]
    numbers, scales = torch.empty(rows, 4096, device="cuda", dtype=INT8), torch.empty(rows, device="cuda")
    fused: dict[str, Any] = {"out": out, "residual_out": residual, "pdl": pdl}
    store: dict[str, Any] = {"table": table, "positions": positions, "q": q, "q_out": q_out, "pdl": pdl}
    return {
        "add_rms_norm": (lambda: norm.add_rms_norm(x, residual, weight, 1e-5, **fused), 4 * rows * 4096 * 2),
        "rms_norm": (lambda: norm.rms_norm(x, weight, 1e-5, out=out, pdl=pdl), 2 * rows * 4096 * 2),
        "add_layer_norm": (lambda: norm.add_layer_norm(x, residual, weight, weight, 1e-5, **fused), 8 * rows * 4096),
        "silu_and_mul": (lambda: activation.silu_and_mul(packed, out=hidden, pdl=pdl), 3 * rows * 14336 * 2),
        "gelu_and_mul": (lambda: activation.gelu_and_mul(packed, out=hidden, pdl=pdl), 3 * rows * 14336 * 2),
        "rotary": (lambda: rotary(q, k, table, positions, q_out=q_out, k_out=k_out, pdl=pdl), 4 * rows * 40 * 128),
        "write_kv": (lambda: kv_write.write_kv(k, v, pools[0], pools[1], slots, **store), 4 * rows * 48 * 128),
        "quantize_rows": (
            lambda: quantize.quantize_rows(x, INT8, out=numbers, scales=scales, pdl=pdl),
            3 * rows * 4096,
        ),
    }


NAMES = ("add_rms_norm", "rms_norm", "add_layer_norm", "silu_and_mul", "gelu_and_mul", "rotary", "write_kv",
         "quantize_rows")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_operators_on_many_rows(benchmark: Any, copy_bandwidth: float, name: str) -> None:
    call, num_bytes = _operators(ROWS, False)[name]
    timed(benchmark, call, 1, num_bytes, copy_bandwidth)


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
@pytest.mark.parametrize("name", NAMES)
def test_operators_on_one_row(benchmark: Any, copy_bandwidth: float, name: str, early: bool) -> None:
    call, num_bytes = _operators(1, early)[name]
    timed(benchmark, lambda: [call() for _ in range(20)], 20, num_bytes, copy_bandwidth)


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
def test_launches_of_a_decode_layer_besides_linears_and_attention(
    benchmark: Any, copy_bandwidth: float, early: bool
) -> None:
    """Norm, store with rotation, norm, activation: microseconds per layer of one row."""
    calls = _operators(1, early)
    layer = [calls[name][0] for name in ("add_rms_norm", "write_kv", "add_rms_norm", "silu_and_mul")]
    timed(benchmark, lambda: [call() for _ in range(16) for call in layer], 16, 0, copy_bandwidth)


#: temperature, top_k, top_p, min_p
FILTERS = {"plain": (0.8, 0, 1.0, 0.0), "top-k": (0.8, 50, 1.0, 0.0), "top-p": (0.8, 0, 0.9, 0.0),
           "all": (0.8, 50, 0.9, 0.05), "greedy": (0.0, 0, 1.0, 0.0)}  # fmt: skip


@pytest.mark.parametrize(("rows", "width"), [(1, 128256), (64, 128256), (64, 49152)])
@pytest.mark.parametrize("name", [*FILTERS, "argmax", "sort of PyTorch"])
def test_sampling(benchmark: Any, copy_bandwidth: float, name: str, rows: int, width: int) -> None:
    logits, out = normal(rows, width, dtype=torch.float32) * 3, torch.empty(rows, dtype=torch.int64, device="cuda")
    workspace = sampling.SamplingWorkspace.allocate("cuda", rows, width)
    temperature, top_k, top_p, min_p = (
        torch.full((rows,), value, device="cuda") for value in FILTERS.get(name, FILTERS["plain"])
    )
    noise = torch.rand(rows, dtype=torch.float64, device="cuda")

    def call() -> object:
        if name == "argmax":
            return greedy.greedy(logits, out=out)
        if name == "sort of PyTorch":
            return torch.sort(logits, dim=-1, descending=True, stable=True)
        return sampling.sample(
            logits, temperature, top_k.long(), top_p, min_p, noise, out=out, workspace=workspace
        )  # fmt: skip

    timed(benchmark, call, 1, 4 * rows * width, copy_bandwidth)


def test_softmax_of_long_rows(benchmark: Any, copy_bandwidth: float) -> None:
    x = normal(64, 128256)
    timed(benchmark, lambda: softmax.softmax(x, out=x), 1, 4 * x.numel(), copy_bandwidth)
