"""The quantizers of `infermix_triton` under Triton's interpreter: run in a process with TRITON_INTERPRET=1.

The interpreter rounds to FP8 wrongly, so `triton_fp8` is left to the conformance suite on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.errors import UserError, WrongResult
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.conformance import check_quantizer
from infermix_triton import quantizer_linears, quantizer_triton
from infermix_triton.plugin import infermix_quantizer
from infermix_triton.quantizer_triton import W4A16Quantizer, W8A8Quantizer, round_to_groups
from torch import nn

torch.set_num_threads(1)
COMPONENTS = {component.name: component for component in infermix_quantizer()}
CONTEXT = QuantizerContext(device="cpu", dtype="float16")


def _model(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 96), nn.Linear(96, 33, bias=False)).half()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("triton_w4a16", {}),
        ("triton_w4a16", {"group_size": 64, "symmetric": False}),
        ("triton_int8", {}),
    ],
)
def test_conformance(name: str, options: dict[str, Any]) -> None:
    component = COMPONENTS[name]
    assert 0 < check_quantizer(component, component.options(**options), device="cpu", dtype="float16") < 0.12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_four_bits_err_by_half_a_step(dtype: torch.dtype, symmetric: bool) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(5, 128) * torch.logspace(-3, 0, 5)[:, None]).to(dtype)
    weight[2] = 0
    q, scales, zeros = round_to_groups(weight, 32, symmetric)
    middle = torch.full_like(scales, 8, dtype=torch.uint8) if zeros is None else zeros
    back = (q.view(5, 4, 32).float() - middle.float()[:, :, None]) * scales.float()[:, :, None]
    error = (back.view(5, 128) - weight.float()).abs().view(5, 4, 32).amax(2)
    # 15 levels of a scale that its dtype rounded: the ends of the range move by 15 eps / 2 steps at most.
    assert (error <= scales.float() * (0.5 + 7.5 * torch.finfo(dtype).eps)).all()


def test_a_group_that_does_not_divide_a_layer_is_refused_before_anything_changes() -> None:
    model = _model()
    with pytest.raises(UserError, match="group size 64 does not divide the 96 inputs of 1"):
        W4A16Quantizer(group_size=64, symmetric=True, skip=()).apply(model, CONTEXT)
    assert all(type(module) is nn.Linear for module in model)


def test_the_report_names_kernels_and_bytes() -> None:
    model = _model()
    report = W8A8Quantizer(torch.int8, skip=()).apply(model, CONTEXT)
    assert report.kernels == {"0": "triton w8a8 int8", "1": "triton w8a8 int8"}
    assert report.quantized_bytes == 64 * 96 + 96 * 33 + 4 * (96 + 33)
    with torch.no_grad():
        assert model(torch.randn(2, 3, 64).half()).shape == (2, 3, 33)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantizer_linears.w4a16_linear
    monkeypatch.setattr(quantizer_linears, "w4a16_linear", lambda x, *rest, **given: right(x * 1.05, *rest, **given))
    with pytest.raises(WrongResult, match="W4A16Linear of 0 with 1 rows differs"):
        W4A16Quantizer(group_size=32, symmetric=True, skip=()).apply(_model(), CONTEXT)
    assert quantizer_triton.W4A16Linear is quantizer_linears.W4A16Linear
