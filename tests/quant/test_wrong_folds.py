"""Scales are folded only where that changes nothing and fits the dtype; what calibration misses is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.errors import UserError
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.quantizer import QuantizerContext
from infermix.spec.validate import Report, check_struct
from infermix.toolkit.calibration import CalibrationOptions
from infermix.toolkit.conformance.quantizer import calibration_model
from infermix_quant.options import SmoothQuantOptions
from infermix_quant.quantizers_folded import SmoothQuantQuantizer
from torch import nn

SAMPLES = torch.randint(0, 90, (4, 24), generator=torch.Generator().manual_seed(0)).tolist()
STATIC = {"activations": "tensor"}
CALIBRATED: list[Any] = [("gptq", {}), ("awq", {}), ("smoothquant", {}), ("int8", STATIC), ("fp8", STATIC)]


def _apply(name: str, model: nn.Module, dtype: str = "float32", **options: Any) -> Any:
    component = load_catalogue().find(Role.QUANTIZER, name).component
    context = QuantizerContext(device="cpu", dtype=dtype, calibration=lambda: SAMPLES)
    return component.build(component.options(**options), None).apply(model, context)  # type: ignore[arg-type]


def _logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor(SAMPLES)).logits.double()


def _error(model: Any, dtype: str, **options: Any) -> tuple[float, Any]:
    before = _logits(model)
    report = SmoothQuantQuantizer(SmoothQuantOptions(**options)).apply(
        model, QuantizerContext(device="cpu", dtype=dtype, calibration=lambda: SAMPLES)
    )
    return float((_logits(model) - before).norm() / before.norm()), report


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_large_residual_does_not_hide_a_wrong_fold(dtype: str) -> None:
    """Gemma's norms multiply by 1 + weight; 16-bit sums with a large residual look the same without the 1."""
    model = calibration_model("gemma").to(getattr(torch, dtype))
    model.model.embed_tokens.weight.data.mul_(100)
    error, report = _error(model, dtype)
    assert report.details["folded_inputs"] == 4
    assert error < 0.01


def test_scales_that_overflow_the_norm_are_not_folded() -> None:
    """A channel that is always 0 would make its norm's weight 1e5, which fp16 does not hold."""
    model = calibration_model("llama").half()
    model.model.embed_tokens.weight.data[:, 5] = 0
    error, report = _error(model, "float16", alpha=1.0)
    assert report.details["folded_inputs"] == 3
    assert error < 0.1


def _untied() -> Any:
    model = calibration_model("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    return model


@pytest.mark.parametrize(("name", "options"), CALIBRATED)
def test_nothing_to_calibrate_is_refused(name: str, options: Any) -> None:
    with pytest.raises(UserError, match=r"no linear of a decoder layer, only lm_head.*\n?.*model\.layers\.0"):
        _apply(name, _untied(), skip=("model.layers.*",), **options)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_bits_for_what_is_not_calibrated_are_refused(name: str) -> None:
    """The head stays as it is: its bits would be ignored in silence."""
    with pytest.raises(UserError, match="no quantized linear matches 'lm_head'"):
        _apply(name, _untied(), skip=(), bits_for={"lm_head": 8})


@pytest.mark.parametrize(("name", "options"), CALIBRATED)
@pytest.mark.parametrize("position", [3, 20])
def test_a_layer_that_overflows_is_named(name: str, options: Any, position: int) -> None:
    """Early tokens are met by the check of layers, late ones where activations are measured."""
    model = calibration_model("gpt2")
    model.transformer.wte.weight.data[95] = float("3e38")
    samples = [[*SAMPLES[0][:position], 95, *SAMPLES[0][position:]]]
    component = load_catalogue().find(Role.QUANTIZER, name).component
    context = QuantizerContext(device="cpu", dtype="float32", calibration=lambda: samples)
    with pytest.raises(UserError, match=r"puts of transformer\.h\.0\S* are not finite"):
        component.build(component.options(**options), None).apply(model, context)  # type: ignore[arg-type]


def test_seeds_below_0_are_refused() -> None:
    """They would draw what their opposite draws."""
    report = Report()
    assert check_struct({"seed": -1}, CalibrationOptions, ("calibration",), report) is None
    assert "calibration.seed" in str(report.errors[0])
