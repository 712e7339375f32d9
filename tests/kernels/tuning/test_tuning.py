"""Tuning without a GPU: the search, the tables on disk, and the entry point under the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from infermix_kernels import measured
from infermix_kernels.matmul_launch import DotLaunch, ExpandLaunch, GemvLaunch, MatmulLaunch, RowLaunch
from infermix_kernels.matmul_table import LinearLaunch, LinearShape, MatmulTable
from infermix_kernels.matmul_tune import linear_points
from infermix_kernels.measured import MeasuredTable
from infermix_kernels.search import search
from infermix_kernels.tune import TuneShapes, tune_all

FOLDER = Path(__file__).parent
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Knobs:
    width: int = 1
    depth: int = 1


AXES = {"width": (1, 2, 4), "depth": (1, 2, 3)}


def test_search_follows_each_axis_to_its_best() -> None:
    tried: list[Knobs] = []

    def seconds(knobs: Knobs) -> float:
        tried.append(knobs)
        return 10.0 - knobs.width + 2.0 * abs(knobs.depth - 2)

    assert search([Knobs()], lambda start: AXES, seconds) == (Knobs(4, 2), 6.0)
    assert len(tried) == len(set(tried)) == 5


def test_search_leaves_the_default_only_for_more_than_noise() -> None:
    start, other = Knobs(1, 1), Knobs(2, 1)
    assert search([start, other], lambda best: {}, {start: 1.0, other: 0.99}.get) == (start, 1.0)
    assert search([start, other], lambda best: {}, {start: 1.0, other: 0.9}.get) == (other, 0.9)


def test_search_skips_what_does_not_run_and_says_when_nothing_does() -> None:
    runs = {Knobs(4, 1): 1.0, Knobs(2, 1): 2.0}
    assert search([Knobs(), Knobs(2, 1)], lambda best: AXES, runs.get) == (Knobs(4, 1), 1.0)
    with pytest.raises(RuntimeError, match="no launch parameters work"):
        search([Knobs()], lambda best: AXES, lambda knobs: None)


def test_two_writers_keep_each_others_entries(tmp_path: Path) -> None:
    first, second = (MeasuredTable(tmp_path, "family", CPU) for _ in range(2))
    first.store("a", {"size": 1}, 0.5)
    second.store("b", {"size": 2}, 0.25)
    again = MeasuredTable(tmp_path, "family", CPU)
    assert (again.get("a"), again.get("b"), again.seconds("b"), len(again)) == ({"size": 1}, {"size": 2}, 0.25, 2)
    assert [path.name for path in tmp_path.iterdir()] == [again.path.name]


@pytest.mark.parametrize("content", ["{", "[]", '{"source": "other", "entries": {"a": {"launch": {}}}}', "\udcff"])
def test_a_damaged_file_or_one_of_other_kernels_counts_as_empty(tmp_path: Path, content: str) -> None:
    table = MeasuredTable(tmp_path, "family", CPU)
    table.path.write_bytes(content.encode(errors="surrogateescape"))
    read = MeasuredTable(tmp_path, "family", CPU)
    assert len(read) == 0
    read.store("b", {"size": 2}, 1.0)
    stored = json.loads(table.path.read_text())
    assert (list(stored["entries"]), stored["source"]) == (["b"], measured.source_hash())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = MeasuredTable(tmp_path, "family", CPU)
    table.store("a", {"size": 1}, 1.0)
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        table.store("b", {"size": 2}, 1.0)
    assert [path.name for path in tmp_path.iterdir()] == [table.path.name]
    assert MeasuredTable(tmp_path, "family", CPU).get("b") is None


@pytest.mark.parametrize(
    "launch",
    [MatmulLaunch(16, 64, 128, 2), GemvLaunch(2), DotLaunch(8), RowLaunch(4, 256), ExpandLaunch()],
    ids=lambda launch: type(launch).__name__,
)
def test_every_kind_of_launch_is_found_again(tmp_path: Path, launch: LinearLaunch) -> None:
    shape = LinearShape("w4a16", 96, 512, 128)
    MatmulTable(tmp_path, CPU).store(shape, 33, launch, 1e-5)
    table = MatmulTable(tmp_path, CPU)
    assert table.find(shape, 64) == table.find(shape, 40) == launch
    assert table.find(shape, 32) is None
    assert table.find(LinearShape("w4a16", 96, 512, 64), 64) is None


def test_row_counts_of_a_class_are_measured_once(tmp_path: Path) -> None:
    shape, table = LinearShape("skinny", 64, 64), MatmulTable(tmp_path, CPU)
    keys = [key for key, _ in linear_points(shape, (1, 3, 4, 5, 64), table, CPU)]
    assert keys == [shape.key(rows) for rows in (1, 4, 8)]
    table.store(shape, 4, GemvLaunch(), 1.0)
    assert len(list(linear_points(shape, (1, 3, 4, 5, 64), table, CPU))) == 2


def test_tuning_needs_a_device_to_measure_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="measured on a CUDA device, not on cpu"):
        tune_all(TuneShapes(linears=[LinearShape("skinny", 64, 64)]), tmp_path, CPU)


def test_interpreted() -> None:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(FOLDER / "tuning_interpreted.py")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
