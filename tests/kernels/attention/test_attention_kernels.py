"""The attention kernels without a GPU: interpreted in a process of their own, compiled for sm_90 in another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from attention_cases import Case, build
from infermix_kernels.attention import pack_tree_mask, paged_attention
from infermix_kernels.launch import Launch, LaunchTable, ShapeClass, default_launch
from run_python import run_python

FOLDER = Path(__file__).parent
SHAPE = ShapeClass("split", 2, 2, 128, 128, 16, 16)


def test_interpreted_kernels_match_the_reference() -> None:
    path = str(FOLDER / "attention_interpreted.py")
    assert " passed" in run_python(["-m", "pytest", "-q", "-p", "no:xdist", path], TRITON_INTERPRET="1")


def test_main_configurations_compile_for_sm_90_without_spills() -> None:
    """Registers and spills of every configuration are printed, as `pytest -s` shows."""
    rows = [json.loads(line) for line in run_python([str(FOLDER / "compile_sm90.py")]).splitlines()]
    for row in rows:
        print(row)
    assert len(rows) >= 8
    assert [row["name"] for row in rows if row["spill_bytes"] > row["allowed_spill_bytes"]] == []
    assert [row["name"] for row in rows if row["shared_bytes"] > 227 * 1024] == []
    assert all(row["wgmma"] for row in rows if row["name"].startswith("prefill") and "fp32" not in row["name"])


def _arguments() -> dict[str, object]:
    return build(Case("plain", (1, 3), (20, 3)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": torch.zeros(5, 16, 2, 32, dtype=torch.float16)}, "keys are torch.float16, values torch.float32"),
        ({"q": torch.zeros(4, 4, 48)}, "keys have head dim 32, q 48"),
        ({"q": torch.zeros(4, 3, 32)}, "3 query heads do not fold onto 2 KV heads"),
        ({"q": torch.zeros(4, 32, 4).transpose(1, 2)}, "contiguous last dimension"),
        ({"q": torch.zeros(4, 4, 32, dtype=torch.float64)}, "supported: bfloat16, float16, float32"),
        ({"context_lens": torch.tensor([20, 3])}, "context_lens is torch.int64, must be int32"),
        ({"cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32)}, "cu_seqlens_q has 2 items, not 3"),
        ({"block_tables": torch.zeros(2, 1, dtype=torch.int32)}, "reach 16 tokens, max_context_len is 20"),
        ({"block_tables": torch.zeros(1, 2, dtype=torch.int32)}, "fewer rows"),
        ({"block_tables": None, "max_context_len": 17}, "rows of 16 tokens"),
        ({"window": 0}, "window is 0"),
        ({"softcap": 0.0}, "softcap is 0.0, must be above 0"),
        ({"scale": float("nan")}, "scale is nan, must be finite"),
        ({"sinks": torch.zeros(2)}, "sinks has shape"),
        ({"tree_mask": torch.zeros(4, dtype=torch.int64), "window": 4}, "tree mask and a window"),
        ({"tree_mask": torch.zeros(4, dtype=torch.int64), "max_query_len": 65}, "at most 64"),
        ({"key_scales": torch.zeros(5, 2, 16)}, "scales are given"),
        ({"keys": torch.zeros(5, 16, 2, 32, dtype=torch.int8)}, "keys are torch.int8, values torch.float32"),
        ({"out": torch.zeros(4, 4, 16)}, "out has shape"),
        ({"out": torch.zeros(4, 4, 32, dtype=torch.float16)}, "out must be contiguous"),
        ({"sinks": torch.zeros(4, device="meta")}, "another device"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_refused_before_the_launch(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**_arguments(), **changes})  # type: ignore[arg-type]


def test_quantized_pools_need_scales_of_their_shape() -> None:
    arguments = build(Case("int8", (1,), (20,), kv=torch.int8))
    with pytest.raises(ValueError, match="need scales"):
        paged_attention(**{**arguments, "value_scales": None})
    by_token = arguments["key_scales"].transpose(1, 2)
    with pytest.raises(ValueError, match=r"scales \[blocks, Hkv, tokens\] \[5, 2, 16\], not \[5, 16, 2\]"):
        paged_attention(**{**arguments, "key_scales": by_token, "value_scales": by_token})
    narrow = {name: arguments[name][..., :30] for name in ("keys", "values", "q")}
    with pytest.raises(ValueError, match="in fours"):
        paged_attention(**{**arguments, **narrow})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": torch.tensor([[1, 9], [2, 0]], dtype=torch.int32)}, r"block_tables\[0, 1\] is 9"),
        ({"context_lens": torch.tensor([20, 40], dtype=torch.int32)}, "sequence 1: context 40"),
        ({"context_lens": torch.tensor([20, 2], dtype=torch.int32)}, "sequence 1: context 2"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 4], dtype=torch.int32)}, "decreases"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_debug_switch_reads_the_tables(changes: dict[str, object], message: str) -> None:
    arguments = _arguments() | {"block_tables": torch.tensor([[1, 3], [2, 0]], dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**arguments, **changes}, check_block_tables=True)  # type: ignore[arg-type]


def test_tree_masks_are_packed_by_column() -> None:
    mask = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
    assert pack_tree_mask(mask).tolist() == [1, 3, 5]
    assert pack_tree_mask(torch.eye(64, dtype=torch.bool))[63] == -(1 << 63)


def test_tuned_parameters_are_kept_on_disk_and_found_again(tmp_path: Path) -> None:
    table = LaunchTable(tmp_path, torch.device("cpu"))
    default, fast = table.find(SHAPE), Launch(16, 128, 8, 3)
    assert (default == fast, SHAPE in table) == (False, False)
    table.store(SHAPE, fast, 1.0)
    again = LaunchTable(tmp_path, torch.device("cpu"))
    assert (again.find(SHAPE), SHAPE in again) == (fast, True)
    other = ShapeClass("prefill", 2, 2, 128, 128, 128, 16)
    assert (again.find(other).block_rows, other in again) == (128, False)


def test_int8_and_fp8_are_classes_of_their_own() -> None:
    int8, fp8 = (ShapeClass("split", 2, 1, 128, 128, 16, 16, fp8=fp8) for fp8 in (False, True))
    assert int8.key != fp8.key


def test_block_sizes_choose_the_launch_of_8_bit_decode() -> None:
    """Large blocks, small ones and dense rows; few sequences split their contexts into larger tiles."""
    large, small, dense = (default_launch(ShapeClass("split", 2, 1, 128, 128, 16, block)) for block in (64, 16, 0))
    assert (large.max_registers, small.max_registers, dense) == (0, 200, small)
    few = default_launch(ShapeClass("split", 2, 1, 128, 128, 16, 64, crowded=False))
    assert few.block_tokens > large.block_tokens
