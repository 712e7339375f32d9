"""NF4 on a GPU: the shapes of an 8B model and odd ones against fp64, and capture in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix_kernels import nf4, norm
from infermix_kernels.launch import overlaps_launches
from infermix_kernels.matmul_launch import GemvLaunch, MatmulLaunch, MatmulWorkspace
from nf4_checks import check_expanded_nf4, check_nf4, random_nf4
from operator_checks import TOLERANCE, Source, error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALVES = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
DOUBLE = pytest.mark.parametrize("double", [False, True], ids=["fp32 scales", "8-bit scales"])
SHAPES = [(4096, 4096, 64), (14336, 4096, 64), (1024, 4096, 64), (4096, 14336, 64)]
ODD = [(333, 4112, 16), (333, 576, 32), (577, 1536, 128), (640, 2048, 512), (70, 320, 64)]


@HALVES
@DOUBLE
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 64, 300])
@pytest.mark.parametrize(("n", "k", "block"), SHAPES + ODD, ids=str)
def test_nf4(dtype: torch.dtype, rows: int, n: int, k: int, block: int, double: bool) -> None:
    check_nf4("cuda", dtype, rows, n, k, block, double)


@pytest.mark.parametrize("rows", [1, 5, 64, 65])
@pytest.mark.parametrize(("n", "k", "block"), ODD, ids=str)
def test_nf4_of_fp32(rows: int, n: int, k: int, block: int) -> None:
    check_nf4("cuda", FP32, rows, n, k, block)


@HALVES
@pytest.mark.parametrize(
    ("rows", "launch"),
    [
        (1, GemvLaunch(1, 4096, 4)),
        (1, GemvLaunch(8, 1024, 2)),
        (3, GemvLaunch(2, 2048, 2)),
        (1, MatmulLaunch(8, 32, 256, 8, 2, 3, planes=2)),
        (40, MatmulLaunch(64, 64, 256, 2, 4, 2)),
        (64, MatmulLaunch(64, 128, 256, 1, 8, 2, planes=2)),
    ],
    ids=str,
)
def test_other_launches(dtype: torch.dtype, rows: int, launch: Any) -> None:
    check_nf4("cuda", dtype, rows, 4096, 4096, 64, False, launch)
    check_nf4("cuda", dtype, rows, 333, 1344, 64, True, launch)


@HALVES
@DOUBLE
@pytest.mark.parametrize("block", [16, 64, 256])
def test_expanded(dtype: torch.dtype, block: int, double: bool) -> None:
    check_expanded_nf4("cuda", dtype, 40, 1000, 4096, block, double)


@pytest.mark.parametrize("rows", [1, 4, 64, 100])
@pytest.mark.parametrize("early", [False, True], ids=["", "early starts"])
def test_a_captured_chain_gives_the_same(rows: int, early: bool) -> None:
    """Norms and products, eager against replays; if the device can, kernels start before their inputs are ready."""
    if early and not overlaps_launches(torch.device("cuda", 0)):
        pytest.skip("needs compute capability 9.0")
    source, size = Source("cuda"), 1024
    weights = [random_nf4(source, size, size, 64, double) for double in (False, True)]
    scale, x = source.positive(size, dtype=BF16), source.normal(rows, size, dtype=BF16)
    workspace = MatmulWorkspace.allocate("cuda", 1 << 20)

    def chain(pdl: bool) -> torch.Tensor:
        y = x
        for weight in weights:
            y = norm.rms_norm(y, scale, 1e-5, pdl=pdl)
            y = nf4.nf4_linear(y, weight, workspace=workspace, pdl=pdl)
        return y

    expected = chain(False)
    chain(early)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(early)
    for _ in range(20):
        captured.fill_(float("nan"))
        graph.replay()
        if rows <= nf4.MAX_TILED_ROWS:
            assert torch.equal(captured, expected)
        else:  # the product is torch's, which may choose another one inside a graph
            assert error(captured, expected) < TOLERANCE[BF16] * 2
