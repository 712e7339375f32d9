"""Drafting decoders refuse random tokens that go on beyond the end of a text."""

from __future__ import annotations

from pathlib import Path

import pytest
from infermix.compose import compose
from infermix.plugins import load_catalogue
from infermix.spec.load import load_experiment

CATALOGUE = load_catalogue()
DRAFTING = ("prompt_lookup", "jacobi", "lookahead", "self_speculative", "{use: speculative, draft: target}")


@pytest.mark.parametrize("decoder", DRAFTING)
@pytest.mark.parametrize(("workload", "runs"), [("synthetic", False), ("corpus", True)])
def test_verdict_of_the_plan(decoder: str, workload: str, runs: bool, tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    options = f"{{use: {workload}, ignore_eos: true}}"
    path.write_text(
        f"model: {tiny_llama}\ndevice: cpu\ndtype: float32\nworkload: {options}\nparts: {{decoder: {decoder}}}\n"
        "limits: {max_model_len: 256}\n"
    )
    (plan,) = compose(load_experiment(path), CATALOGUE)
    assert plan.runs == runs, plan.reasons
    assert runs or "real prompts" in plan.reasons[0]


@pytest.mark.parametrize("workload", ["synthetic", "trace", "sessions"])
def test_workloads_without_text_say_so(workload: str) -> None:
    from infermix.roles.component import Role
    from infermix.toolkit.conformance import example_machine, example_model

    component = CATALOGUE.find(Role.WORKLOAD, workload).component
    given = {"path": "trace.csv"} if workload == "trace" else {}
    provided = component.provides(component.options(**given), example_model(), example_machine("cpu"))
    assert {"workload:random_tokens", "workload:ignore_eos"} <= provided
