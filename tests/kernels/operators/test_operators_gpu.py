"""The operators on a GPU: every shape and dtype against fp64, and capture in a CUDA graph."""

from __future__ import annotations

from typing import Any

import operator_checks as check
import pytest
import torch
from infermix_kernels import fp8, gemv, greedy, norm, quantize, w4a16, w8a8
from infermix_kernels.gemv import GemvLaunch
from infermix_kernels.matmul_launch import MatmulLaunch, MatmulWorkspace, RowLaunch
from infermix_kernels.reference import sampling as meant
from infermix_kernels.w8a8 import DotLaunch
from sampling_checks import CASES, check_sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FP32, FP16, BF16, INT8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
HALVES = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])


@DTYPES
@pytest.mark.parametrize(
    ("shape", "packed"),
    [((1, 4096), False), ((700, 4096), True), ((33, 32, 128), True), ((2000, 576), False), ((3, 14336), False)],
    ids=str,
)
def test_norms(dtype: torch.dtype, shape: tuple[int, ...], packed: bool) -> None:
    check.check_norms("cuda", dtype, shape, packed)


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 14336), (70, 1536), (129, 333)])
def test_activations(dtype: torch.dtype, rows: int, width: int) -> None:
    check.check_activations("cuda", dtype, rows, width)


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(3, 49152), (130, 1000), (2, 128256)])
def test_softmax(dtype: torch.dtype, rows: int, width: int) -> None:
    check.check_softmax("cuda", dtype, rows, width)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "rotary_dim"),
    [(1, (32, 8), 128, 128), (300, (9, 3), 64, 64), (65, (32, 32), 80, 32), (7, (8, 1), 256, 64)],
)
def test_rotary(
    dtype: torch.dtype, interleaved: bool, tokens: int, heads: tuple[int, int], dim: int, rotary_dim: int
) -> None:
    check.check_rotary("cuda", dtype, tokens, heads, dim, rotary_dim, interleaved)


@HALVES
@pytest.mark.parametrize("pool", [None, INT8, FP8], ids=["plain", "int8", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "heads", "dims", "rotary_dim", "block_size"),
    [
        (1, (32, 8), (128, 128), 128, 16),
        (333, (9, 3), (64, 64), 64, 256),
        (70, (12, 12), (80, 80), 0, 24),
        (5, (16, 16), (192, 128), 64, 64),
    ],
    ids=str,
)
def test_kv_write(
    dtype: torch.dtype,
    pool: torch.dtype | None,
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    rotary_dim: int,
    block_size: int,
) -> None:
    check.check_kv_write("cuda", dtype, tokens, heads, dims, rotary_dim, pool, block_size)
    if rotary_dim:
        check.check_kv_write("cuda", dtype, tokens, heads, dims, rotary_dim, pool, block_size, normed=True)


@DTYPES
@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
def test_quantize_rows(dtype: torch.dtype, kind: torch.dtype) -> None:
    for rows, width in ((1, 4096), (300, 14336), (5, 77)):
        check.check_quantize_rows("cuda", dtype, kind, rows, width)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_sample(name: str, dtype: torch.dtype) -> None:
    for rows, width in ((64, 49152), (3, 128256), (5, 333)):
        check_sample("cuda", name, rows, width, dtype)


@DTYPES
def test_greedy(dtype: torch.dtype) -> None:
    for rows, width in ((1, 128256), (64, 49152), (7, 333)):
        logits = torch.randn(rows, width, device="cuda").to(dtype)
        assert torch.equal(greedy.greedy(logits), meant.greedy(logits))


SHAPES = pytest.mark.parametrize(("n", "k"), [(6144, 4096), (576, 1536), (333, 4112)])


@DTYPES
@SHAPES
@pytest.mark.parametrize(
    ("rows", "launch"),
    [
        (1, None),
        (1, GemvLaunch(4, 256)),
        (2, None),
        (5, None),
        (16, None),
        (8, MatmulLaunch(8, 16, 128, 1, 1, 5)),
        (3, MatmulLaunch(16, 64, 128, 4, swap=False)),
    ],
    ids=str,
)
def test_skinny(dtype: torch.dtype, n: int, k: int, rows: int, launch: Any) -> None:
    check.check_skinny("cuda", dtype, rows, n, k, launch)


@HALVES
@pytest.mark.parametrize(
    ("n", "k", "group", "zeros", "act_order"),
    [
        (4096, 4096, 128, False, False),
        (576, 1536, 64, True, False),
        (333, 576, 32, True, False),
        (640, 1024, 1024, True, False),
        (256, 2048, 128, True, True),
        (512, 1024, 128, "fractional", False),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("rows", "launch"),
    [
        (1, None),
        (1, MatmulLaunch(8, 16, 256, 1, 1, 4)),
        (7, None),
        (64, None),
        (300, None),
        (300, MatmulLaunch(128, 128, 256, 1, 8, 2)),
        (33, MatmulLaunch(16, 64, 256, 4, 4, 3)),
        (64, MatmulLaunch(64, 128, 256, 4, 8, 3, planes=4)),
        (130, MatmulLaunch(128, 128, 256, 1, 8, 2, planes=4)),
        (130, MatmulLaunch(128, 256, 256, 1, 8, 2, planes=2)),
        (130, MatmulLaunch(64, 128, 256, 1, 4, 2)),
    ],
    ids=str,
)
def test_w4a16(
    dtype: torch.dtype, rows: int, launch: Any, n: int, k: int, group: int, zeros: check.Zeros, act_order: bool
) -> None:
    check.check_w4a16("cuda", dtype, rows, n, k, group, zeros, act_order, launch)


@HALVES
@pytest.mark.parametrize("zeros", [True, "fractional"])
@pytest.mark.parametrize("act_order", [False, True])
def test_expanded_w4(dtype: torch.dtype, act_order: bool, zeros: check.Zeros) -> None:
    check.check_expanded_w4("cuda", dtype, 40, 1000, 4096, 128, act_order, zeros)


@HALVES
@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("groups", [0, 32])
@pytest.mark.parametrize("rows", [1, 9, 100, 500])
def test_w8a16(dtype: torch.dtype, kind: torch.dtype, groups: int, rows: int) -> None:
    check.check_w8a16("cuda", dtype, rows, 640, 4096, kind, groups)


@HALVES
@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize(
    ("rows", "launch"),
    [
        (1, None),
        (9, None),
        (64, None),
        (500, None),
        (500, MatmulLaunch(128, 128, 128, 1, 8, 3, swap=False, descriptors=True)),
        (500, MatmulLaunch(128, 256, 128, 1, 8, 3, swap=False)),
        (1, MatmulLaunch(16, 64, 256, 2)),
    ],
    ids=str,
)
def test_w8a8(dtype: torch.dtype, kind: torch.dtype, rows: int, launch: Any) -> None:
    for n, k in ((4096, 4096), (336, 1040)):
        check.check_w8a8("cuda", dtype, rows, n, k, kind, launch)


def test_one_row_of_bytes_in_other_tiles() -> None:
    check.check_w8a8("cuda", BF16, 1, 333, 4112, INT8, DotLaunch(2, 256, 2))


@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
def test_fused_w8a8(kind: torch.dtype) -> None:
    check.check_fused_w8a8("cuda", BF16, 5, 512, 4096, kind)


@HALVES
@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("launch", [RowLaunch(), RowLaunch(4, 256, 4), RowLaunch(16, 1024, 8)], ids=str)
def test_one_row_quantized_on_the_way(dtype: torch.dtype, kind: torch.dtype, launch: RowLaunch) -> None:
    for n, k in ((6144, 4096), (4096, 14336), (333, 1044)):
        check.check_fused_w8a8("cuda", dtype, 1, n, k, kind, launch)


def _chain(x: Any, weights: Any, workspace: MatmulWorkspace, pdl: bool) -> Any:
    scales, norm_weight, dense, w4, w8, wf8 = weights
    y = norm.rms_norm(x, norm_weight, 1e-5, pdl=pdl)
    y = gemv.skinny_linear(y, dense, workspace=workspace, pdl=pdl)
    y = norm.rms_norm(y, norm_weight, 1e-5, pdl=pdl)
    y = w4a16.w4a16_linear(y, w4, workspace=workspace, pdl=pdl)
    y = norm.rms_norm(y, norm_weight, 1e-5, pdl=pdl)
    y = w8a8.w8a8_linear(y, w8, scales, workspace=workspace, pdl=pdl)
    y = norm.rms_norm(y, norm_weight, 1e-5, pdl=pdl)
    return fp8.fp8_linear(y, wf8, scales, workspace=workspace, pdl=pdl)


@pytest.mark.parametrize("rows", [1, 4])
def test_captured_chain_with_early_starts_gives_the_same_bits(rows: int) -> None:
    """A chain of dependent launches, eager against a graph in which kernels start before their inputs are ready."""
    source = check.Source("cuda")
    size = 1024
    weights = (
        source.positive(size),
        source.normal(size, dtype=BF16),
        source.normal(size, size, dtype=BF16),
        check.random_w4(source, size, size, 128, True, False),
        check.random_w8(source, size, size, INT8),
        check.random_w8(source, size, size, FP8),
    )
    workspace = MatmulWorkspace.allocate("cuda", 1 << 20)
    x = source.normal(rows, size, dtype=BF16)
    expected = _chain(x, weights, workspace, False)
    _chain(x, weights, workspace, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _chain(x, weights, workspace, True)
    for _ in range(50):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected)


def test_quantized_rows_can_be_shared_by_products() -> None:
    source = check.Source("cuda")
    x = source.normal(3, 512, dtype=BF16)
    weight, scale = check.random_w8(source, 256, 512, INT8), source.positive(256)
    numbers, x_scale = quantize.quantize_rows(x, INT8)
    out = torch.empty(3, 256, dtype=BF16, device="cuda")
    w8a8.int8_product(numbers, x_scale, weight, scale, out=out)
    assert torch.equal(out, w8a8.w8a8_linear(x, weight, scale))


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize(("features", "width"), [(1536, 576), (14336, 4096), (33, 70)], ids=str)
def test_gated_row(dtype: torch.dtype, features: int, width: int, activation: str) -> None:
    check.check_gated_row("cuda", dtype, features, width, activation)
