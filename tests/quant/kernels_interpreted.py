"""Kernel linears under Triton's interpreter. Collected only where TRITON_INTERPRET was set before the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.errors import WrongResult
from infermix.roles.quantizer import QuantizerContext
from infermix_kernels import nf4
from infermix_kernels.pack import PackedW4, pack_w4
from infermix_quant import kernel_linears
from infermix_quant.gptq import GptqSettings, gptq
from infermix_quant.hqq import HqqSettings, hqq
from infermix_quant.kernel_linears import (
    KernelLinear,
    LlmInt8KernelLinear,
    Nf4KernelLinear,
    W4KernelLinear,
    W8A8KernelLinear,
    use_kernels,
)
from infermix_quant.linear_fp8 import Fp8Linear, fp8_weight
from infermix_quant.linear_grouped import GroupedLinear
from infermix_quant.linear_int8 import Int8Linear, LlmInt8Linear, Outliers, int8_weight
from infermix_quant.nf4 import Nf4Linear
from infermix_quant.options import Nf4Options, nf4_bits
from torch import nn


def _weight() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_four_bits_run_on_the_kernel(act_order: bool, symmetric: bool) -> None:
    """`use_kernels` itself compares every shape with its plain meaning; here the whole model is compared again."""
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    plain = GroupedLinear(gptq(_weight(), x.t() @ x, GptqSettings(4, 32, symmetric, act_order=act_order)), None)
    model = nn.ModuleDict({"up": plain})
    made = use_kernels(model, {"up": plain}, QuantizerContext(device="cpu", dtype="float32"))
    assert isinstance(made["up"], W4KernelLinear)
    assert model["up"] is made["up"]
    torch.testing.assert_close(made["up"](x[:3]), plain(x[:3]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("group_size", [32, 64, 256])
def test_zero_points_between_integers_run_on_the_kernel(dtype: str, group_size: int) -> None:
    kind, draw = getattr(torch, dtype), torch.Generator().manual_seed(0)
    weight = (torch.randn(16, 512, generator=draw) + 0.3).to(kind)
    plain = GroupedLinear(hqq(weight, HqqSettings(4, group_size)), torch.ones(16, dtype=kind))
    assert plain.zero is not None
    assert plain.zero.is_floating_point()
    context = QuantizerContext(device="cpu", dtype=dtype)
    made = use_kernels(nn.ModuleDict({"up": plain}), {"up": plain}, context)["up"]
    assert isinstance(made, W4KernelLinear)
    assert made.kernel == "triton w4a16"
    x = (torch.randn(2, 3, 512, generator=draw) + 1).to(kind)  # sums over groups are large
    exact = x.double() @ plain.dequantize(torch.float64).t() + 1
    error, allowed = (float((each.double() - exact).norm() / exact.norm()) for each in (made(x), plain(x)))
    assert error <= max(2 * allowed, 1e-4), "no worse than rounding each weight, or than fp32 products of tf32"


def test_groups_of_large_activations_and_no_rows_at_all() -> None:
    """Sums of such groups are beyond fp16, products with weights of both signs are not."""
    draw = torch.Generator().manual_seed(0)
    plain = GroupedLinear(hqq(torch.randn(16, 512, generator=draw).half() / 50, HqqSettings(4, 256)), None)
    context = QuantizerContext(device="cpu", dtype="float16")
    made = use_kernels(nn.ModuleDict({"up": plain}), {"up": plain}, context)["up"]
    assert isinstance(made, W4KernelLinear)
    x = torch.full((2, 512), 600.0, dtype=torch.float16)
    assert x[0, :256].sum().isinf()
    exact = x.double() @ plain.dequantize(torch.float64).t()
    assert float((made(x).double() - exact).norm() / exact.norm()) < 1e-2
    assert made(x[:0]).shape == (0, 16), "as of an expert that no token goes to"


def test_what_is_left_of_zero_points_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the kernel would be another quantizer, and `use_kernels` says so."""

    def whole_zeros(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, **given: Any) -> PackedW4:
        return pack_w4(q, scale, zero.round().byte(), **given)

    monkeypatch.setattr(kernel_linears, "pack_w4", whole_zeros)
    plain = GroupedLinear(hqq(_weight(), HqqSettings(4, 32)), None)
    with pytest.raises(WrongResult, match=r"triton w4a16 of up with 1 rows differs"):
        use_kernels(nn.ModuleDict({"up": plain}), {"up": plain}, QuantizerContext(device="cpu", dtype="float32"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("double_quant", [False, True])
def test_nf4_runs_on_the_kernel(double_quant: bool, dtype: str) -> None:
    """`use_kernels` compares every way of multiplying; here leading rows, a bias, and the bytes that are held."""
    kind, draw = getattr(torch, dtype), torch.Generator().manual_seed(0)
    weight = torch.randn(16, 1024, generator=draw)
    scale_block = 256 if double_quant else None
    plain = Nf4Linear(weight, torch.ones(16, dtype=kind), block_size=64, scale_block=scale_block)
    model = nn.ModuleDict({"up": plain})
    made = use_kernels(model, {"up": plain}, QuantizerContext(device="cpu", dtype=dtype))["up"]
    assert isinstance(made, Nf4KernelLinear)
    assert model["up"] is made
    assert made.kernel == "triton nf4, above 64 rows dequantize (triton) + matmul"
    assert made.num_bytes == plain.num_bytes
    assert made.num_bytes * 8 / weight.numel() == pytest.approx(
        nf4_bits(Nf4Options(double_quant=double_quant)), abs=0.01
    )
    x = torch.randn(2, 3, 1024, generator=draw).to(kind)
    torch.testing.assert_close(made(x), plain(x), rtol=1e-2, atol=1e-1 if kind == torch.float16 else 1e-3)


def test_a_wrong_nf4_kernel_is_found_with_many_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the way that expands weights is wrong."""
    monkeypatch.setattr(nf4, "dequantize", lambda weight, out, *, first_row: out.zero_())
    plain = Nf4Linear(_weight(), None, block_size=64, scale_block=None)
    with pytest.raises(WrongResult, match=r"dequantize \(triton\) \+ matmul of up with 65 rows differs"):
        use_kernels(nn.ModuleDict({"up": plain}), {"up": plain}, QuantizerContext(device="cpu", dtype="float16"))


def test_int8_runs_on_the_kernel_in_half_precision() -> None:
    plain = Int8Linear(*int8_weight(_weight()), None)
    made = use_kernels(nn.ModuleDict({"up": plain}), {"up": plain}, QuantizerContext(device="cpu", dtype="float16"))
    assert isinstance(made["up"], W8A8KernelLinear)
    assert made["up"].kernel == "triton w8a8 int8"


@pytest.mark.parametrize("outliers", ["values", "columns"])
@pytest.mark.parametrize("threshold", [0.0, 1.0, 6.0, 1e4])
def test_llm_int8_runs_on_two_kernels(outliers: Outliers, threshold: float) -> None:
    """`use_kernels` compares them with their meaning, on outliers too; here with odd and leading rows, and a bias."""
    plain = LlmInt8Linear(*int8_weight(_weight()), torch.ones(16).half(), threshold, outliers)
    context = QuantizerContext(device="cpu", dtype="float16")
    made = use_kernels(nn.ModuleDict({"up": plain}), {"up": plain}, context)["up"]
    assert isinstance(made, LlmInt8KernelLinear)
    assert made.kernel == "triton w8a8 int8 + w8a16 over outliers"
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).half()
    x[..., 5] *= 20
    expected = plain(x).double()
    assert (made(x).double() - expected).norm() / expected.norm() < 1e-2
    x[1, 1, 7] = float("nan")
    assert made(x).isnan().any(-1).tolist() == [[False] * 3, [False, True, False]]


def test_outliers_that_the_kernel_loses_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_linears, "w8a16_linear", lambda x, weight, *_, **__: x.new_zeros(len(x), len(weight)))
    plain = LlmInt8Linear(*int8_weight(_weight()), None, 6.0)
    with pytest.raises(WrongResult, match="w8a16 over outliers of up with 1 rows differs"):
        use_kernels(nn.ModuleDict({"up": plain}), {"up": plain}, QuantizerContext(device="cpu", dtype="float16"))


def test_what_no_kernel_multiplies_stays() -> None:
    linears = {
        "three": GroupedLinear(gptq(_weight(), torch.eye(64), GptqSettings(3, 32, True)), None),
        "odd": GroupedLinear(gptq(_weight(), torch.eye(64), GptqSettings(4, 16, True)), None),
        "hqq": GroupedLinear(hqq(_weight(), HqqSettings(3, 32)), None),
        "small": Nf4Linear(_weight(), None, block_size=8, scale_block=None),
        "across": Nf4Linear(_weight(), None, block_size=128, scale_block=None),
        "weights": Fp8Linear(*fp8_weight(_weight(), "channel"), None, activations="none"),
    }
    made = use_kernels(nn.ModuleDict(linears), dict(linears), QuantizerContext(device="cpu", dtype="float16"))
    assert not any(isinstance(each, KernelLinear) for each in made.values())
    assert {made[name].kernel for name in ("small", "across")} == {"dequantize+matmul"}
