"""What `plan` says of several outputs and of searches."""

from __future__ import annotations

from pathlib import Path

import pytest
from infermix.compose import compose
from infermix.plugins import load_catalogue
from infermix.spec.load import load_experiment

CATALOGUE = load_catalogue()


def verdict(tmp_path: Path, model: Path, workload: str, parts: str, engine: str = "native", limits: str = "") -> str:
    """Empty when the cell runs, otherwise its reasons."""
    path = tmp_path / "x.yaml"
    path.write_text(
        f"model: {model}\ndevice: cpu\ndtype: float32\nengine: {engine}\nparts: {{{parts}}}\n"
        f"workload: {{use: corpus, input_tokens: 8, max_new_tokens: 8, {workload}}}\n"
        f"limits: {{max_model_len: 64{limits}}}\n"
    )
    (plan,) = compose(load_experiment(path), CATALOGUE)
    assert plan.runs == (not plan.reasons)
    return "; ".join(plan.reasons)


@pytest.mark.parametrize(
    ("workload", "parts", "engine", "reason"),
    [
        ("num_outputs: 3, temperature: 1", "kv: paged", "native", ""),
        ("num_outputs: 3, temperature: 1", "kv: dense, decoder: jacobi", "native", ""),
        ("num_outputs: 3", "kv: paged", "native", "needs decoder:search"),
        ("num_outputs: 3, temperature: 1", "kv: {use: h2o, budget: 9}", "native", "needs kv:fork"),
        ("num_outputs: 3, temperature: 1", "", "transformers", "needs engine:outputs"),
    ],
)
def test_outputs(tiny_llama: Path, tmp_path: Path, workload: str, parts: str, engine: str, reason: str) -> None:
    found = verdict(tmp_path, tiny_llama, workload, parts, engine)
    assert reason in found
    assert bool(reason) == bool(found)
