"""Cells with stored weights: the quality gate, and the native engine in its child process."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import infermix


def test_a_cell_beyond_the_baselines_perplexity_is_wrong(
    experiment: Callable[..., Path], real_model: dict[str, Any], plugin: str, tmp_path: Path
) -> None:
    path = experiment(
        model=real_model,
        quality=[{"use": "fake"}],
        sweep={"engine.perplexity": [16.0, 10.0]},
        baseline={"engine.perplexity": 10.0},
    )
    wrong, baseline = infermix.run(path, out=tmp_path / "out", ceilings=False, extra_plugins=[plugin])
    assert baseline.state == "ok"
    assert baseline.quality["perplexity[fake]"].value == 10.0
    assert wrong.state == "wrong"
    assert "1.60 times the baseline's 10" in wrong.reason
    assert not wrong.metrics
    assert wrong.quality["perplexity[fake]"].value == 16.0
    assert "quality" in wrong.phases_s
    (alone,) = infermix.run(
        path, out=tmp_path / "out", only="*16*", fresh=True, ceilings=False, extra_plugins=[plugin]
    )
    assert alone.state == "wrong", "the baseline's earlier record still judges"


def test_the_native_engine_agrees_with_its_reference(
    experiment: Callable[..., Path], real_model: dict[str, Any], plugin: str, tmp_path: Path
) -> None:
    path = experiment(
        model=real_model,
        engine="native",
        dtype="float32",
        parts={"attention": "sdpa", "kv": {"use": "paged", "block_size": 4}},
        quality=[{"use": "distance"}],
    )
    (record,) = infermix.run(path, out=tmp_path / "out", ceilings=False, profile=True, extra_plugins=[plugin])
    assert (record.state, record.reason) == ("ok", "")
    assert record.quality["distance"].value < 1e-4
    assert "Dense" in record.quality["distance"].details["kv"]
    assert all(part.executed for part in record.parts.values())
    assert record.self_check["relative_error"] < 1e-4
    assert record.memory["kv_bytes_per_token"] == 2 * 2 * 8 * 4
    assert {sample.finish_reason for sample in record.repeats[0].requests} == {"length"}
    (trace,) = (tmp_path / "out" / "traces").iterdir()
    assert "traceEvents" in json.loads(gzip.decompress(trace.read_bytes()))
    assert len(record.repeats) == 2
