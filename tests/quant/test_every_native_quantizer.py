"""What holds for every native quantizer: bad weights and patterns are refused, old weights are freed on the way."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from infermix.errors import UserError
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.conformance.quantizer import calibration_model

SAMPLES = torch.randint(0, 90, (2, 16), generator=torch.Generator().manual_seed(0)).tolist()
NAMES = ("rtn", "gptq", "awq", "smoothquant", "hqq", "nf4", "llm_int8", "int8", "fp8")
SCALED_IN_16_BITS = ("rtn", "gptq", "hqq")


def _quantizer(name: str, **options: Any) -> Any:
    component = load_catalogue().find(Role.QUANTIZER, name).component
    return component.build(component.options(**options), None)  # type: ignore[arg-type]


def _context(**given: Any) -> QuantizerContext:
    return QuantizerContext(device="cpu", dtype="float32", calibration=lambda: SAMPLES, **given)


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_of_skip_that_matches_nothing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"no module of the model matches '\*down_porj'.*\n?.*model\.layers\.0"):
        _quantizer(name, skip=("*lm_head", "*down_porj")).apply(calibration_model("llama"), _context())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["model.embed_tokens", "model.norm", "model.layers.1.mlp.down_proj"])
def test_weights_that_are_not_finite_are_named_wherever_they_are(name: str, where: str) -> None:
    model = calibration_model("llama")
    model.get_submodule(where).weight.data.flatten()[3] = float("nan")
    with pytest.raises(UserError, match=rf"the weights of {where} are not finite"):
        _quantizer(name).apply(model, _context())


@pytest.mark.parametrize("name", SCALED_IN_16_BITS)
def test_weights_beyond_16_bit_scales_are_refused(name: str) -> None:
    model = calibration_model("llama")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 2e6
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.up_proj reach 2e\+06"):
        _quantizer(name, bits=4).apply(model, _context())


@pytest.mark.parametrize("name", NAMES)
def test_old_weights_are_freed_layer_by_layer(name: str) -> None:
    """Of 14 matrices the 7 of one decoder layer may still be there at the end, not all."""
    model, alive = calibration_model("llama"), []
    old = [weakref.ref(each.weight) for each in model.model.layers.modules() if type(each) is torch.nn.Linear]
    assert len(old) == 14
    context = _context(progress=lambda phase, share: alive.append(sum(each() is not None for each in old)))
    _quantizer(name).apply(model, context)
    assert alive[-1] <= 7
