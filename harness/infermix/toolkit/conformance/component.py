"""What holds for a component of any role."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import torch

from infermix.roles.component import Component, meets
from infermix.roles.facts import LayerFacts, MachineFacts, MatrixFacts, ModelFacts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def example_model(head_dim: int = 64, features: frozenset[str] = frozenset()) -> ModelFacts:
    """A two-layer model, enough for the rules of a component."""
    return ModelFacts(
        source="example",
        model_type="llama",
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=128,
        hidden_size=256,
        max_position_embeddings=256,
        layers=(LayerFacts("attention", 4, 2, head_dim, head_dim),) * 2,
        matrices=(MatrixFacts("mlp", 256, 512, 2),),
        features=features,
    )


def example_machine(device: str | None = None) -> MachineFacts:
    """This machine as far as parts ask for it; `cuda` when there is one, unless told otherwise."""
    if (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        return MachineFacts("cpu", "cpu", 2**33, 2)
    major, minor = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory
    return MachineFacts("cuda", torch.cuda.get_device_name(), memory, 2, compute_capability=10 * major + minor)


def machine_for(component: Component, options: Any) -> MachineFacts:
    """This machine with its GPU where the component takes it, as one without where it does not.

    Models and inputs of a check belong on `machine_for(...).device`: a kernel reads no tensor of another device.
    """
    machine = example_machine()
    needs = component.needs(options, example_model(), machine)
    accepted = all(meets(need, machine.provides) for need in needs if need.startswith("device:"))
    return machine if accepted else example_machine("cpu")


def not_here(component: Component, options: Any, machine: MachineFacts, dtype: str | None = None) -> str | None:
    """Why this machine cannot run the component (in `dtype`, where one is given), or `None`."""
    if component.environment is not None:
        return f"{component.name} works on files in an environment of its own"
    needs = component.needs(options, example_model(), machine)
    unmet = [
        need
        for need in sorted(needs)
        if need.startswith(("device:", "sm:", "weights:", "inputs:")) and not meets(need, machine.provides)
    ]
    if unmet:
        return f"{component.name} needs {', '.join(unmet)}"
    refused = [need for need in needs if need.startswith("dtype:") and f"dtype:{dtype}" not in need.split("|")]
    if dtype and refused:
        return f"{component.name} needs {', '.join(refused)}, not {dtype}"
    return None if usable_dtype(needs) else f"{component.name} runs in none of {', '.join(DTYPES)}"


def usable_dtype(needs: frozenset[str]) -> str | None:
    """The most precise dtype that the needs allow."""
    wanted = [need for need in needs if need.startswith("dtype:")]
    return next((name for name in DTYPES if all(f"dtype:{name}" in need.split("|") for need in wanted)), None)


def check_component(component: Component, options: Any = None) -> None:
    """Names, documentation of every option, and rules that are pure and return frozen sets of feature names.

    Without `options`, the rules of a component whose options have no complete defaults are not called.
    """
    label = f"{component.role} {component.name!r}"
    assert component.summary.strip(), f"{label} has no summary"
    assert component.name == component.name.strip().lower(), f"{label} is not a lower-case name"
    _check_options(component, label)
    if options is None and any(field.required for field in msgspec.structs.fields(component.options)):
        return
    options = component.options() if options is None else options
    model, machine = example_model(), example_machine("cpu")
    for rule in (component.needs, component.provides):
        _check_rule(rule, options, model, machine, label)
    adapters = component.adapters(options, model, machine)
    assert adapters == component.adapters(options, model, machine), f"the adapters of {label} change between calls"
    assert isinstance(component.lossless(options), bool), f"lossless of {label} is no bool"
    bits = component.weight_bits(options)
    assert bits is None or 0 < bits <= 64, f"weight_bits of {label} is {bits}"


def _check_options(component: Component, label: str) -> None:
    hints = typing.get_type_hints(component.options, include_extras=True)
    for field in msgspec.structs.fields(component.options):
        assert _described(hints[field.name]), f"option {field.name} of {label} has no description"
    config = component.options.__struct_config__
    assert config.frozen, f"the options of {label} are not frozen"
    assert config.forbid_unknown_fields, f"the options of {label} accept unknown keys"


def _described(hint: Any) -> bool:
    """Whether an annotation carries a description, itself or inside a union such as `Annotated[int, ...] | None`."""
    metas = getattr(hint, "__metadata__", ())
    return any(getattr(meta, "description", None) for meta in metas) or any(
        _described(inner) for inner in typing.get_args(hint)
    )


def _check_rule(rule: Any, options: Any, model: ModelFacts, machine: MachineFacts, label: str) -> None:
    first, second = rule(options, model, machine), rule(options, model, machine)
    assert isinstance(first, frozenset), f"a rule of {label} returns {type(first).__name__}, not frozenset"
    assert first == second, f"a rule of {label} is not pure"
    names = [name for each in first for name in each.split("|")]
    assert all(":" in name for name in names), f"{label} names a feature without a prefix: {sorted(names)}"
