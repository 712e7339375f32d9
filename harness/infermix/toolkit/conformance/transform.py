"""Conformance of model transforms: tiny random models, the same logits before and after."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from infermix.roles.component import Component
from infermix.roles.transform import STAGES, ModelTransform, TransformContext, TransformReport
from infermix.toolkit.conformance.component import example_model, machine_for

#: Rotary positions, RMS norms, gated MLP and fewer KV heads; learned positions, layer norms, biases, merged q/k/v.
TRANSFORM_FAMILIES = ("llama", "gpt2")
_HEAD_DIM, _VOCAB = 16, 96
#: Rounding of a re-ordered sum in each of a few layers, relative to the norm of all logits.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}


def check_transform(
    component: Component,
    options: Any = None,
    *,
    family: str = "llama",
    device: str | None = None,
    dtype: str = "float32",
) -> TransformReport:
    """Apply it to a tiny random model of a family; returns its report.

    Runs on `device`, by default on CUDA where there is one and the transform takes it.

    The logits of inputs of several lengths stay the same up to rounding, also when asked twice, and the report fits:
    it names the component, counts what it replaced, and verifies only kinds that it replaced. A report that replaced
    nothing has to say why. A lossy transform may change the logits by any finite amount.
    """
    options = component.options() if options is None else options
    device = machine_for(component, options).device if device is None else device
    transform: ModelTransform = component.build(options, None)
    assert transform.stage in STAGES, f"{component.name} has stage {transform.stage!r}, expected one of {STAGES}"
    model = _tiny_model(family).to(device, getattr(torch, dtype))
    inputs = _inputs(device)
    before = _logits(model, inputs)
    report = transform.apply(model, _context(family, device, dtype))
    tolerance = _TOLERANCES[dtype] if component.lossless(options) else math.inf
    for _ in range(2):
        error = _relative_error(_logits(model, inputs), before)
        assert error <= tolerance, f"{component.name} changes the logits of {family} by {error:.2e} ({tolerance:.0e})"
    _check_report(component, report, tolerance)
    return report


def _check_report(component: Component, report: TransformReport, tolerance: float) -> None:
    assert report.name == component.name, f"the report of {component.name} is called {report.name!r}"
    assert all(count > 0 for count in report.replaced.values()), f"counts of zero belong to kept: {report.replaced}"
    assert report.replaced or report.kept, f"{component.name} replaced nothing and does not say why"
    assert all(reason.strip() for reason in report.kept.values()), f"kept without a reason: {report.kept}"
    strange = set(report.verified) - set(report.replaced)
    assert not strange, f"{component.name} verified what it did not replace: {sorted(strange)}"
    wrong = {kind: error for kind, error in report.verified.items() if not 0 <= error <= tolerance}
    assert not wrong, f"{component.name} reports errors beyond {tolerance:.0e}: {wrong}"


def _context(family: str, device: str, dtype: str) -> TransformContext:
    facts = replace(example_model(_HEAD_DIM), model_type=family, dtype=dtype, vocab_size=_VOCAB)
    return TransformContext(device=device, dtype=dtype, seed=0, facts=facts, max_num_seqs=8)


def _tiny_model(family: str) -> nn.Module:
    """Two layers, fp32, with norms and biases that are not their neutral initial values."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "llama": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": _HEAD_DIM, "max_position_embeddings": 128},
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    }[family]  # fmt: skip
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        kind: Any = CONFIG_MAPPING[family]
        config = kind(vocab_size=_VOCAB, initializer_range=0.2, bos_token_id=1, eos_token_id=2, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    return model.eval().requires_grad_(False)


def _inputs(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(_VOCAB, (1, length), generator=generator).to(device) for length in (1, 2, 7, 33)]


def _logits(model: Any, inputs: list[Tensor]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(input_ids=ids, use_cache=False).logits.double() for ids in inputs]


def _relative_error(seen: list[Tensor], expected: list[Tensor]) -> float:
    """The worst of all inputs."""
    pairs = zip(seen, expected, strict=True)
    errors = [float((new - old).norm() / old.norm().clamp_min(1e-30)) for new, old in pairs]
    return max(errors) if all(map(math.isfinite, errors)) else math.nan
