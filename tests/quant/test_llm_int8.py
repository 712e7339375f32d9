"""LLM.int8: what stays out of the integers, by value and by column, against its definition in fp64."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from infermix.roles.quantizer import QuantizerContext
from infermix_quant.linear_int8 import Int8Linear, LlmInt8Linear, int8_weight, quantize_rows_int8
from infermix_quant.options import LlmInt8Options
from infermix_quant.quantizers_plain import LlmInt8Quantizer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

Outliers = Literal["values", "columns"]
THRESHOLD = 6.0
BOTH = pytest.mark.parametrize("outliers", ["values", "columns"])


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _linear(width: int, outliers: Outliers, num_outputs: int = 12, bias: Tensor | None = None) -> LlmInt8Linear:
    return LlmInt8Linear(*int8_weight(_randn(num_outputs, width)), bias, THRESHOLD, outliers)


def _defined(linear: LlmInt8Linear, x: Tensor, apart: Tensor) -> Tensor:
    """Equation 8 of the paper with the products in fp64; `apart` of x's shape."""
    weight = linear.weight.double() * linear.weight_scale.double()[:, None]
    integers, scale = quantize_rows_int8(torch.where(apart, 0, x))
    rounded = (integers.double() * scale.double()) @ weight.t()
    return rounded + torch.where(apart, x.double(), 0) @ weight.t()


def _error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@BOTH
@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (5, 7), (6, 64), (2, 3, 33), (0, 8), (9,)])
def test_both_kinds_are_what_they_are_defined_to_be(outliers: Outliers, shape: tuple[int, ...]) -> None:
    x, width = _randn(*shape, seed=1), shape[-1]
    x[..., :: max(width // 4, 1)] *= 20
    apart = x.abs() > THRESHOLD
    if outliers == "columns":
        apart = apart.reshape(-1, width).any(0).expand(shape)
    bias = _randn(12, seed=2)
    linear = _linear(width, outliers, bias=bias)
    expected = _defined(linear, x, apart) + bias
    assert linear(x).shape == (*shape[:-1], 12)
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-4)


@BOTH
def test_without_outliers_it_is_int8(outliers: Outliers) -> None:
    linear, x = _linear(64, outliers), _randn(6, 64, seed=1)
    assert float(x.abs().max()) < THRESHOLD
    torch.testing.assert_close(linear(x), Int8Linear(linear.weight, linear.weight_scale, None)(x))


@BOTH
def test_where_all_are_outliers_activations_stay_as_they_are(outliers: Outliers) -> None:
    linear, x = _linear(64, outliers), 10 + _randn(6, 64, seed=1).abs()
    weight = linear.weight.double() * linear.weight_scale.double()[:, None]
    torch.testing.assert_close(linear(x).double(), x.double() @ weight.t(), rtol=1e-5, atol=1e-4)


@BOTH
def test_outliers_do_not_widen_the_scale(outliers: Outliers) -> None:
    linear, x = _linear(64, outliers), _randn(6, 64, seed=1)
    x[:, 5] *= 60
    exact = x.double() @ (linear.weight.double() * linear.weight_scale.double()[:, None]).t()
    plain = Int8Linear(linear.weight, linear.weight_scale, None)(x)
    assert _error(linear(x), exact) < 0.5 * _error(plain, exact)


def test_a_value_leaves_alone_and_a_column_with_its_company() -> None:
    """The one row that exceeds the threshold takes the column out for the others, which gain by it."""
    x = 0.1 * _randn(6, 64, seed=1)
    x[:, 5] = 5.0
    values, columns = _linear(64, "values"), _linear(64, "columns")
    together = torch.cat([x, 2 * x[:1]])
    torch.testing.assert_close(values(together)[:6], values(x))
    torch.testing.assert_close(columns(x), values(x))
    exact = x.double() @ (columns.weight.double() * columns.weight_scale.double()[:, None]).t()
    assert _error(columns(together)[:6], exact) < 0.2 * _error(columns(x), exact)


def test_in_one_row_both_are_the_same() -> None:
    x = _randn(1, 64, seed=1) * 6
    assert 0 < (x.abs() > THRESHOLD).sum() < 64
    assert torch.equal(_linear(64, "values")(x), _linear(64, "columns")(x))


@BOTH
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen_in_its_row_alone(outliers: Outliers, poison: float) -> None:
    linear, x = _linear(64, outliers), _randn(6, 64, seed=1)
    x[2, 9] = poison
    finite = torch.isfinite(linear(x)).all(dim=1)
    assert finite.tolist() == [True, True, False, True, True, True]


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outliers_keep_the_models_precision(outliers: Outliers, dtype: torch.dtype) -> None:
    linear = _linear(64, outliers)
    x = torch.zeros(3, 64, dtype=dtype)
    x[:, 5] = 100 + torch.arange(3)  # apart by less than one step of 127 over this row, with the 8 bits of bf16 exact
    expected = x.double() @ (linear.weight.double() * linear.weight_scale.double()[:, None]).t()
    assert linear(x).dtype == dtype
    assert _error(linear(x), expected) < torch.finfo(dtype).eps


@BOTH
def test_nothing_is_read_on_the_host(outliers: Outliers) -> None:
    """Tensors without data: whatever asked for a value, or for how many there are, would raise."""
    linear = _linear(64, outliers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert linear(torch.empty(5, 64)).shape == (5, 12)


def test_the_report_says_which() -> None:
    context = QuantizerContext(device="cpu", dtype="float32")

    def method(**given: Outliers) -> str:
        model = nn.ModuleDict({"up": nn.Linear(8, 7)})
        return LlmInt8Quantizer(LlmInt8Options(**given)).apply(model, context).method

    assert "outliers above 6 in 16 bits" in method()
    assert "outlier columns of a call above 6 in 16 bits" in method(outliers="columns")
