"""What a plan refuses of the Triton quantizers and transforms, and with which reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from infermix.features import match
from infermix.plugins import load_catalogue
from infermix.roles.component import Choice, Role
from infermix.roles.facts import MachineFacts, MatrixFacts, ModelFacts
from infermix.toolkit.conformance.component import example_model

H200 = MachineFacts("cuda", "NVIDIA H200", 141 << 30, 132, compute_capability=90)
A100 = MachineFacts("cuda", "NVIDIA A100", 80 << 30, 108, compute_capability=80)
T4 = MachineFacts("cuda", "Tesla T4", 16 << 30, 40, compute_capability=75)
CPU = MachineFacts("cpu", "a CPU", 1 << 34, 2)
QUANTIZERS = ("triton_w4a16", "triton_int8", "triton_fp8")
TRANSFORMS = ("fuse", "skinny_linear", "triton_sampling")
EVERY = [*((Role.QUANTIZER, name) for name in QUANTIZERS), *((Role.TRANSFORM, name) for name in TRANSFORMS)]


def _problems(role: Role, name: str, machine: MachineFacts, model: ModelFacts, **options: Any) -> str:
    registered = load_catalogue().find(role, name)
    choice = Choice(registered, registered.component.options(**options))
    if role == Role.TRANSFORM:
        return "\n".join(match({}, (), model, machine, (choice,)).problems)
    return "\n".join(match({role: choice}, (), model, machine).problems)


def _model(dtype: str = "bfloat16", width: int = 256, vocab_size: int = 128) -> ModelFacts:
    matrices = (MatrixFacts("mlp", width, 512, 2), MatrixFacts("lm_head", 100, vocab_size, 1))
    return replace(example_model(), dtype=dtype, matrices=matrices, vocab_size=vocab_size)


@pytest.mark.parametrize(("role", "name"), EVERY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_on_a_large_device_are_taken(role: Role, name: str, dtype: str) -> None:
    assert _problems(role, name, H200, _model(dtype)) == ""


@pytest.mark.parametrize(("role", "name"), EVERY)
@pytest.mark.parametrize(
    ("machine", "reason"),
    [(CPU, "needs device:cuda, this cell runs on cpu"), (T4, ", this cell runs on cuda (Tesla T4)")],
    ids=["cpu", "old device"],
)
def test_other_devices_are_refused(role: Role, name: str, machine: MachineFacts, reason: str) -> None:
    problems = _problems(role, name, machine, _model("float16"))
    assert f"{role.value} {name!r} needs" in problems
    assert reason in problems


def test_fp8_asks_for_its_tensor_cores() -> None:
    assert "needs sm:89" in _problems(Role.QUANTIZER, "triton_fp8", A100, _model())
    assert _problems(Role.QUANTIZER, "triton_int8", A100, _model()) == ""


@pytest.mark.parametrize(("name", "taken"), [("triton_w4a16", True), ("triton_int8", False), ("triton_fp8", False)])
def test_eight_bit_activations_are_not_for_fp32(name: str, taken: bool) -> None:
    problems = _problems(Role.QUANTIZER, name, H200, _model("float32"))
    assert (problems == "") == taken
    assert taken or "needs dtype:float16 or dtype:bfloat16, this cell computes in float32" in problems


@pytest.mark.parametrize(("role", "name"), EVERY)
def test_doubles_are_refused(role: Role, name: str) -> None:
    machine = replace(H200, dtypes=frozenset({"float64", "float32", "float16", "bfloat16"}))
    assert "this cell computes in float64" in _problems(role, name, machine, _model("float64"))


def test_groups_have_to_divide_the_width() -> None:
    problems = _problems(Role.QUANTIZER, "triton_w4a16", H200, _model(width=576))
    assert "group_size:one that divides 576 inputs (such as 8, 16, 32, 64), not 128" in problems
    assert _problems(Role.QUANTIZER, "triton_w4a16", H200, _model(width=576), group_size=64) == ""
    assert _problems(Role.QUANTIZER, "triton_w4a16", H200, _model(width=576), skip=("*",)) == ""


def test_a_vocabulary_beyond_the_kernels_is_refused() -> None:
    assert _problems(Role.TRANSFORM, "triton_sampling", H200, _model(vocab_size=262144)) == ""
    problems = _problems(Role.TRANSFORM, "triton_sampling", H200, _model(vocab_size=262145))
    assert "needs vocab_size:262144" in problems


def test_the_limit_of_the_plan_is_that_of_the_kernels() -> None:
    sampling = pytest.importorskip("infermix_kernels.sampling")
    assert sampling.MAX_VOCABULARY == 262144
