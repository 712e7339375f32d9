"""The operators under Triton's interpreter. Collected only where TRITON_INTERPRET was set before the start.

fp32 and fp16 only: the interpreter computes bfloat16 wrongly, without a word, and converts to FP8 wrongly where a
significand rounds up to 2.
"""

from __future__ import annotations

from typing import Any

import operator_checks as check
import pytest
import torch
from infermix_kernels.gemv import GemvLaunch
from infermix_kernels.matmul_launch import MatmulLaunch, RowLaunch
from infermix_kernels.w8a8 import DotLaunch

FP32, FP16, INT8, FP8 = torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])


@DTYPES
@pytest.mark.parametrize(("shape", "packed"), [((5, 72), False), ((3, 2, 40), True), ((520, 12), False)])
def test_norms(dtype: torch.dtype, shape: tuple[int, ...], packed: bool) -> None:
    check.check_norms("cpu", dtype, shape, packed)


@DTYPES
def test_activations(dtype: torch.dtype) -> None:
    check.check_activations("cpu", dtype, 3, 77)


@DTYPES
@pytest.mark.parametrize("width", [1, 77, 16389])
def test_softmax(dtype: torch.dtype, width: int) -> None:
    check.check_softmax("cpu", dtype, 2, width)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(16, 16), (40, 24)])
def test_rotary(dim: int, rotary_dim: int, interleaved: bool) -> None:
    check.check_rotary("cpu", FP32, 3, (6, 2), dim, rotary_dim, interleaved)


def test_rotary_of_many_tokens() -> None:
    check.check_rotary("cpu", FP16, 64, (3, 1), 16, 8, False)


@pytest.mark.parametrize("pool", [None, INT8], ids=["plain", "int8"])
@pytest.mark.parametrize("rotary_dim", [0, 24], ids=["unrotated", "rotated"])
def test_kv_write(rotary_dim: int, pool: torch.dtype | None) -> None:
    check.check_kv_write("cpu", FP32, 7, (6, 3), (40, 24), rotary_dim, pool)


@pytest.mark.parametrize("pool", [None, INT8], ids=["plain", "int8"])
@pytest.mark.parametrize("rotary_dim", [40, 24], ids=["whole heads", "partly rotated"])
def test_kv_write_of_normed_heads(rotary_dim: int, pool: torch.dtype | None) -> None:
    check.check_kv_write("cpu", FP32, 7, (6, 3), (40, 24), rotary_dim, pool, normed=True)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize(("features", "width"), [(5, 70), (8, 64)], ids=["odd", "even"])
def test_gated_row(activation: str, features: int, width: int) -> None:
    check.check_gated_row("cpu", FP32, features, width, activation)


def test_quantize_rows() -> None:
    check.check_quantize_rows("cpu", FP16, INT8, 3, 77)


@DTYPES
@pytest.mark.parametrize(
    ("rows", "launch"),
    [
        (1, None),
        (1, GemvLaunch(4, 128)),
        (3, None),
        (16, MatmulLaunch(16, 32, 64, 4)),
        (5, MatmulLaunch(16, 32, 64, swap=False)),
    ],
    ids=["gemv", "gemv tile", "default", "split", "unswapped"],
)
def test_skinny(dtype: torch.dtype, rows: int, launch: Any) -> None:
    check.check_skinny("cpu", dtype, rows, 70, 330, launch)


@pytest.mark.parametrize(
    ("rows", "launch"),
    [
        (1, None),
        (3, MatmulLaunch(16, 64, 256, 2)),
        (70, MatmulLaunch(128, 64, 256)),
        (20, MatmulLaunch(32, 32, 256, 2, planes=4)),
    ],
    ids=["default", "split", "large", "planes together"],
)
@pytest.mark.parametrize(
    ("group", "zeros", "act_order"),
    [(32, True, False), (64, False, False), (576, True, False), (64, True, True), (64, "fractional", True)],
    ids=["g32 zeros", "g64", "one group", "act-order", "fractional zeros"],
)
def test_w4a16(rows: int, launch: Any, group: int, zeros: check.Zeros, act_order: bool) -> None:
    dtype = FP16 if zeros else FP32
    check.check_w4a16("cpu", dtype, rows, 70, 576, group, zeros, act_order, launch)


@pytest.mark.parametrize("zeros", [True, "fractional"])
@pytest.mark.parametrize("act_order", [False, True])
def test_expanded_w4(act_order: bool, zeros: check.Zeros) -> None:
    check.check_expanded_w4("cpu", FP16, 5, 70, 576, 64, act_order, zeros)


@pytest.mark.parametrize("groups", [0, 5])
@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
def test_w8a16(kind: torch.dtype, groups: int) -> None:
    check.check_w8a16("cpu", FP32, 3, 70, 320, kind, groups)


@pytest.mark.parametrize(
    ("rows", "kind", "launch"),
    [
        (1, INT8, None),
        (1, INT8, DotLaunch(2, 32)),
        (5, INT8, MatmulLaunch(16, 32, 64, 2)),
        (1, FP8, MatmulLaunch(16, 32, 64)),
        (5, FP8, MatmulLaunch(16, 32, 64, 2, swap=False)),
        (5, INT8, MatmulLaunch(16, 32, 64, swap=False, descriptors=True)),
    ],
)
def test_w8a8(rows: int, kind: torch.dtype, launch: Any) -> None:
    check.check_w8a8("cpu", FP32, rows, 70, 336, kind, launch)


def test_fused_w8a8() -> None:
    check.check_fused_w8a8("cpu", FP32, 3, 70, 336, INT8)


@pytest.mark.parametrize(("n", "k"), [(70, 336), (64, 512), (33, 20)], ids=str)
def test_one_row_quantized_on_the_way(n: int, k: int) -> None:
    check.check_fused_w8a8("cpu", FP16, 1, n, k, INT8, RowLaunch(8, 64))
    check.check_row_of_fp8_numbers("cpu", FP16, n, k, RowLaunch(8, 64))
