"""The component `triton`: what a plan says about it, and its backend under the interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from infermix.features import match
from infermix.plugins import load_catalogue
from infermix.roles.component import Choice, Role
from infermix.roles.facts import LayerFacts, MachineFacts, ModelFacts
from infermix.toolkit.conformance.component import example_model
from run_python import run_python

FOLDER = Path(__file__).parent
H200 = MachineFacts("cuda", "NVIDIA H200", 141 << 30, 132, compute_capability=90)
T4 = MachineFacts("cuda", "Tesla T4", 16 << 30, 40, compute_capability=75)
CPU = MachineFacts("cpu", "a CPU", 1 << 34, 2)


def _problems(machine: MachineFacts, model: ModelFacts | None = None, kv: str = "paged", **options: bool) -> str:
    catalogue = load_catalogue()
    choices = {}
    for role, name, given in ((Role.ATTENTION, "triton", options), (Role.KV, kv, {})):
        registered = catalogue.find(role, name)
        choices[role] = Choice(registered, registered.component.options(**given))
    found = match(choices, (), model or replace(example_model(), dtype="bfloat16"), machine)
    assert not found.adapters
    return "\n".join(found.problems)


def _model(key_dim: int, value_dim: int) -> ModelFacts:
    layer = LayerFacts("attention", 4, 2, key_dim, value_dim)
    return replace(example_model(), dtype="bfloat16", layers=(layer,))


def test_paged_and_dense_kv_are_read_without_an_adapter() -> None:
    assert [_problems(H200, kv=kv) for kv in ("paged", "dense")] == ["", ""]


def test_every_feature_of_a_model_is_met() -> None:
    features = frozenset({"attn:sliding_window", "attn:softcap", "attn:sinks"})
    assert _problems(H200, replace(_model(192, 128), features=features)) == ""


@pytest.mark.parametrize(
    ("machine", "model", "kv", "reason"),
    [
        (CPU, None, "paged", "attention 'triton' needs device:cuda, this cell runs on cpu"),
        (T4, None, "paged", "attention 'triton' needs sm:80, this cell runs on cuda (Tesla T4)"),
        (H200, None, "concat", "attention 'triton' needs view:paged or view:dense"),
        (H200, _model(288, 288), "paged", "the model needs head_dim:288"),
        (H200, _model(128, 512), "paged", "the model needs head_dim:128"),
        (H200, replace(_model(64, 64), dtype="float64"), "paged", "dtype"),
    ],
    ids=["cpu", "old device", "ragged view", "wide keys", "wide values", "float64"],
)
def test_a_plan_says_why_not(machine: MachineFacts, model: ModelFacts | None, kv: str, reason: str) -> None:
    assert reason in _problems(machine, model, kv)


def test_the_debug_switch_gives_up_graphs() -> None:
    component = load_catalogue().find(Role.ATTENTION, "triton").component
    features = component.provides(component.options(check_block_tables=True), example_model(), H200)
    assert "graph:no" in features
    assert "graph:no" not in component.provides(component.options(), example_model(), H200)


def test_the_backend_reads_mixed_batches() -> None:
    pytest.importorskip("triton")
    path = str(FOLDER / "attention_backend_interpreted.py")
    assert " passed" in run_python(["-m", "pytest", "-q", path], TRITON_INTERPRET="1")


@pytest.mark.full
def test_the_backend_conforms_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    program = (
        "from infermix.toolkit import conformance; from infermix_triton.plugin import infermix_attention\n"
        "print(conformance.check_attention(infermix_attention()[0]))"
    )
    assert int(run_python(["-c", program], TRITON_INTERPRET="1")) >= 160
