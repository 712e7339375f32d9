"""What `plan` says of several outputs and of searches."""

from __future__ import annotations

from pathlib import Path

import pytest
from infermix.compose import compose
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
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
        ("num_outputs: 3, temperature: 1", "kv: {use: h2o, budget: 9}", "native", ""),
        ("num_outputs: 3, temperature: 1", "", "transformers", "needs engine:outputs"),
    ],
)
def test_outputs(tiny_llama: Path, tmp_path: Path, workload: str, parts: str, engine: str, reason: str) -> None:
    found = verdict(tmp_path, tiny_llama, workload, parts, engine)
    assert reason in found
    assert bool(reason) == bool(found)


def test_outputs_and_searches_need_forks(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        f"model: {tiny_llama}\ndevice: cpu\ndtype: float32\nparts: {{decoder: {{use: beam, num_beams: 4}}}}\n"
        "workload: {use: corpus, num_outputs: 2, input_tokens: 8, max_new_tokens: 8}\n"
    )
    (plan,) = compose(load_experiment(path), CATALOGUE)
    for choice in (plan.workload, plan.parts[Role.DECODER]):
        assert "kv:fork" in choice.component.needs(choice.options, plan.facts, plan.machine)


BEAM = "decoder: {use: beam, num_beams: 4}"


@pytest.mark.parametrize(
    ("workload", "parts", "reason"),
    [
        ("num_outputs: 3", BEAM, ""),
        ("temperature: 0.7", BEAM, "a search is deterministic"),
        ("stop: [x]", BEAM, "knows stop tokens only"),
        ("num_outputs: 2", f"kv: {{use: h2o, budget: 9}}, {BEAM}", ""),
        ("num_outputs: 1", f"scheduler: {{use: continuous, preemption: swap}}, {BEAM}", "not swapped to the host"),
    ],
)
def test_searches(tiny_llama: Path, tmp_path: Path, workload: str, parts: str, reason: str) -> None:
    swap = ", kv_swap_bytes: 1000000" if "swap" in parts else ""
    found = verdict(tmp_path, tiny_llama, workload, parts, limits=swap)
    assert reason in found
    assert bool(reason) == bool(found)


def test_rows_of_a_search_count_in_the_memory_prediction(tiny_llama: Path, tmp_path: Path) -> None:
    sizes = []
    for parts in ("kv: dense", f"kv: dense, {BEAM}"):
        path = tmp_path / "x.yaml"
        path.write_text(
            f"model: {tiny_llama}\ndevice: cpu\ndtype: float32\nparts: {{{parts}}}\nlimits: {{max_model_len: 64}}\n"
            "workload: {use: corpus, input_tokens: 8, max_new_tokens: 8, num_requests: 6}\n"
        )
        (plan,) = compose(load_experiment(path), CATALOGUE)
        assert plan.memory is not None
        sizes.append((plan.max_num_seqs, plan.memory.kv_bytes))
    (plain, plain_bytes), (beams, beam_bytes) = sizes
    assert beams == 4 * plain
    assert beam_bytes > 3 * plain_bytes
