"""NF4 under Triton's interpreter. Collected only where TRITON_INTERPRET was set before the start.

fp32 and fp16 only, see `operators_interpreted`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix_kernels import nf4
from infermix_kernels.matmul_launch import ExpandLaunch, GemvLaunch, MatmulLaunch
from nf4_checks import check_expanded_nf4, check_nf4, random_nf4
from operator_checks import Source

FP32, FP16 = torch.float32, torch.float16
#: Input features and block: rows that end within a run of 256 columns, blocks of a run and more, the smallest ones.
SIZES = pytest.mark.parametrize(("k", "block"), [(320, 64), (288, 32), (1024, 512), (272, 16)], ids=str)
DOUBLE = pytest.mark.parametrize("double", [False, True], ids=["fp32 scales", "8-bit scales"])


@pytest.mark.parametrize(
    ("block", "kinds"),
    [
        (64, {1: GemvLaunch, 2: MatmulLaunch, 64: MatmulLaunch, 65: ExpandLaunch}),
        (16, {1: GemvLaunch, 4: GemvLaunch, 5: ExpandLaunch}),
    ],
)
def test_records_say_what_the_number_of_rows_decides(block: int, kinds: dict[int, type[Any]]) -> None:
    weight = random_nf4(Source("cpu"), 3, 320, block)
    assert {rows: type(nf4.default_launch(rows, weight)) for rows in kinds} == kinds
    last = max(rows for rows, kind in kinds.items() if kind is not ExpandLaunch)
    assert f"above {last} rows dequantize (triton) + matmul" in nf4.described(block)


@SIZES
@DOUBLE
@pytest.mark.parametrize("rows", [1, 3])
def test_default_launches(rows: int, k: int, block: int, double: bool) -> None:
    check_nf4("cpu", FP16, rows, 35, k, block, double)


@pytest.mark.parametrize("rows", [1, 20])
def test_fp32(rows: int) -> None:
    check_nf4("cpu", FP32, rows, 35, 320, 64)


@pytest.mark.parametrize(
    ("rows", "launch"),
    [
        (1, GemvLaunch(4, 256, 1)),
        (2, GemvLaunch(1, 1024, 4)),
        (3, MatmulLaunch(16, 32, 256, 2, planes=2)),
        (20, MatmulLaunch(32, 16, 256, 1, planes=4)),
    ],
    ids=["few columns a step", "rows one by one", "split", "planes together"],
)
@pytest.mark.parametrize(("k", "block"), [(576, 64), (768, 256)], ids=str)
def test_other_launches(rows: int, launch: Any, k: int, block: int) -> None:
    check_nf4("cpu", FP16, rows, 35, k, block, True, launch)


@SIZES
@DOUBLE
def test_expanded(k: int, block: int, double: bool) -> None:
    check_expanded_nf4("cpu", FP16, 5, 70, k, block, double)
