"""The tuning entry under Triton's interpreter: what it runs, stores, and what calls look up afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from infermix_kernels import gemv, w8a8
from infermix_kernels.attention_tune import ModelShape
from infermix_kernels.launch import LaunchTable
from infermix_kernels.matmul_launch import GemvLaunch, MatmulLaunch, RowLaunch
from infermix_kernels.matmul_table import LinearShape, MatmulTable
from infermix_kernels.reference import matmul as meant
from infermix_kernels.tune import TuneShapes, tune_all

torch.set_num_threads(1)
CPU = torch.device("cpu")


def _prefer(**wanted: Any) -> Callable[[Sequence[Any]], float]:
    """A measurement that likes launches with these fields; runs one call of each kind of launch and kernel."""
    ran: set[Any] = set()

    def measure(calls: Sequence[Any]) -> float:
        launch = calls[0].keywords["launch"]
        if (type(launch), calls[0].func) not in ran:
            ran.add((type(launch), calls[0].func))
            calls[0]()
        return 1.0 - 0.2 * sum(getattr(launch, name, None) == value for name, value in wanted.items())

    return measure


def test_attention_is_tuned_for_the_classes_of_a_model(tmp_path: Path) -> None:
    model = ModelShape(
        num_heads=2, num_kv_heads=1, key_dim=16, value_dim=16, block_size=16, dtype=torch.float32, kv_dtype=torch.int8
    )
    shapes = TuneShapes(attention=[model], max_context_len=16, max_num_seqs=2)
    said: list[tuple[str, float]] = []
    report = tune_all(
        shapes, tmp_path, CPU, lambda name, done: said.append((name, done)), measure=_prefer(num_warps=8)
    )
    assert report.measured == [name for name, _ in said]
    assert len(report.measured) >= 2
    assert said[0][1] == 0.0
    assert all(path.parent == tmp_path for path in report.files)
    table = LaunchTable(tmp_path, CPU)
    kinds = {key.split()[1] for key in report.measured}
    assert kinds == {"split"}
    assert len(table) == len(report.measured)
    assert tune_all(shapes, tmp_path, CPU, measure=_prefer()).measured == []


def test_rows_that_hold_their_values_are_a_class_of_their_own(tmp_path: Path) -> None:
    model = ModelShape(
        num_heads=2, num_kv_heads=1, key_dim=24, value_dim=16, block_size=16, dtype=torch.float32, shared_values=True
    )
    shapes = TuneShapes(attention=[model], max_context_len=16, max_num_seqs=1)
    report = tune_all(shapes, tmp_path, CPU, measure=_prefer(num_warps=8))
    assert {key.split()[1] for key in report.measured} == {"latent"}
    assert len(LaunchTable(tmp_path, CPU)) == len(report.measured)


def test_linears_are_tuned_and_use_what_was_found(tmp_path: Path) -> None:
    linears = [LinearShape("skinny", 40, 64), LinearShape("int8", 40, 64)]
    shapes = TuneShapes(linears=linears, rows=(1, 2))
    report = tune_all(shapes, tmp_path, CPU, measure=_prefer(num_warps=2, block_n=8))
    assert len(report.measured) == 4
    table = MatmulTable(tmp_path, CPU)
    found = [table.find(shape, rows) for shape in linears for rows in (1, 2)]
    assert [type(launch) for launch in found] == [GemvLaunch, MatmulLaunch, RowLaunch, MatmulLaunch]
    assert all(launch.num_warps == 2 for launch in found)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator).half() for size in ((2, 64), (40, 64)))
    assert gemv._launch(x, weight, table) == found[1]
    out = gemv.skinny_linear(x, weight, launches=table)
    torch.testing.assert_close(out, meant.linear(x, weight), rtol=1e-3, atol=1e-3)
    numbers, scale = torch.randint(-127, 128, (40, 64), dtype=torch.int8), torch.rand(40)
    out = w8a8.w8a8_linear(x[:1], numbers, scale, launches=table)
    torch.testing.assert_close(out, meant.quantized_linear(x[:1], numbers, scale), rtol=2e-3, atol=2e-2)
