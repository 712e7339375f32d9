"""Attention over 4- and 2-bit groups without a GPU: interpreted in a process of its own, compiled in another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from grouped_cases import GroupedCase, build
from infermix_kernels.attention_grouped import grouped_attention
from run_python import run_python

FOLDER = Path(__file__).parent


def test_interpreted_kernels_match_the_reference() -> None:
    paths = [str(FOLDER / name) for name in ("grouped_interpreted.py", "group_write_interpreted.py")]
    assert " passed" in run_python(["-m", "pytest", "-q", "-p", "no:xdist", *paths], TRITON_INTERPRET="1")


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.full)])
def test_configurations_compile_for_sm_90_without_spills(count: int) -> None:
    rows = [json.loads(line) for line in run_python([str(FOLDER / "compile_grouped.py"), str(count)]).splitlines()]
    assert len(rows) == count
    assert [row["name"] for row in rows if row["spill_bytes"] > row["allowed_spill_bytes"]] == []
    assert [row["name"] for row in rows if row["shared_bytes"] > 227 * 1024] == []


def _arguments() -> dict[str, Any]:
    return build(GroupedCase("plain", (1, 3), (70, 3)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": torch.zeros(12, 2, 16, 16, dtype=torch.int8)}, "keys are torch.int8, must be torch.uint8"),
        ({"keys": torch.zeros(12, 2, 16, 32, dtype=torch.uint8)}, "supported: 4 and 2 bits"),
        ({"values": torch.zeros(12, 2, 16, 8, dtype=torch.uint8)}, "values has shape"),
        ({"key_factors": torch.zeros(12, 2, 32, 1, dtype=torch.float16)}, "key_factors has shape"),
        ({"value_factors": torch.zeros(12, 2, 16, 2, 2)}, "value_factors are torch.float32"),
        ({"tail_keys": torch.zeros(3, 52, 2, 32, dtype=torch.float16)}, "tail_keys are torch.float16, q is"),
        ({"block_size": 24}, "groups of 16 do not divide blocks of 24"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pools_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = _arguments()
    with pytest.raises(ValueError, match=message):
        grouped_attention(**{**arguments, "pools": replace(arguments["pools"], **changes)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 3, 32)}, "3 query heads do not fold onto 2 KV heads"),
        ({"tail_rows": torch.zeros(2, dtype=torch.int64)}, "tail_rows is torch.int64, must be int32"),
        ({"tail_rows": torch.zeros(1, dtype=torch.int32)}, "tail_rows has fewer rows"),
        ({"block_tables": torch.zeros(2, 1, dtype=torch.int32)}, "max_context_len is 70"),
        ({"window": 0}, "window is 0"),
        ({"softcap": 0.0}, "softcap is 0.0, must be above 0"),
        ({"scale": float("nan")}, "scale is nan, must be finite"),
        ({"sinks": torch.zeros(2)}, "sinks must be"),
        ({"out": torch.zeros(4, 4, 16)}, "out has shape"),
        ({"context_lens": torch.tensor([70, 3])}, "context_lens is torch.int64, must be int32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_refused_before_the_launch(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_attention(**{**_arguments(), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": torch.tensor([[0, 1, 9], [3, 0, 0]], dtype=torch.int32)}, r"block_tables\[0, 2\] is 9"),
        ({"tail_rows": torch.tensor([0, 3], dtype=torch.int32)}, r"tail_rows are \[0, 3\] of 3 rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_debug_switch_reads_the_tables(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_attention(**{**_arguments(), **changes}, check_block_tables=True)
