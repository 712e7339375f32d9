"""NF4's table, FP8's rounding, HQQ's objective: each against its definition."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch
from infermix.errors import UserError
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.conformance.quantizer import calibration_model
from infermix_quant.grid import fit_grid, round_groups
from infermix_quant.hqq import HqqSettings, group_error, hqq
from infermix_quant.linear_fp8 import E4M3, Fp8Linear, fp8_weight, round_e4m3
from infermix_quant.linear_int8 import Int8Linear, int8_weight
from infermix_quant.nf4 import NF4_VALUES, Nf4Linear, nearest_codes
from infermix_quant.options import Fp8Options, Nf4Options, nf4_bits
from infermix_quant.quantizers_plain import Fp8Quantizer, Nf4Quantizer
from torch import nn


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_nf4_values_are_the_quantiles_of_the_paper() -> None:
    """Appendix E: eight quantiles of each sign from 0.9677083 towards the median, zero added, scaled to +-1."""
    offset, normal = 0.9677083, NormalDist()

    def quantiles(count: int) -> list[float]:
        step = (offset - 0.5) / (count - 1)
        return [normal.inv_cdf(offset - step * index) for index in range(count - 1)]

    values = sorted([*quantiles(9), 0.0, *(-value for value in quantiles(8))])
    expected = torch.tensor(values, dtype=torch.float64) / max(map(abs, values))
    torch.testing.assert_close(torch.tensor(NF4_VALUES, dtype=torch.float64), expected, rtol=0, atol=1e-6)


def test_nf4_rounds_to_the_nearest_value() -> None:
    values = torch.linspace(-1, 1, 999)
    brute = (values[:, None] - torch.tensor(NF4_VALUES)).abs().argmin(dim=1)
    assert torch.equal(nearest_codes(values).long(), brute)


@pytest.mark.parametrize("double_quant", [False, True])
def test_nf4_error_and_bits(double_quant: bool) -> None:
    weight = _randn(64, 256)
    linear = Nf4Linear(weight, None, block_size=64, scale_block=256 if double_quant else None)
    options = Nf4Options(double_quant=double_quant)
    assert linear.num_bytes * 8 / weight.numel() == pytest.approx(nf4_bits(options), abs=0.01)
    assert nf4_bits(options) == pytest.approx(4.127 if double_quant else 4.5, abs=5e-4)
    error = (linear.dequantize(torch.float32) - weight).view(-1, 64).abs()
    widest_gap = (1 - 0.6961928009986877) / 2
    assert (error <= weight.view(-1, 64).abs().amax(1, keepdim=True) * (widest_gap + 0.03 * double_quant)).all()


def test_nf4_blocks_that_do_not_fit_are_refused() -> None:
    context = QuantizerContext(device="cpu", dtype="float32")
    with pytest.raises(UserError, match="blocks of 64 do not divide the 35 weights of up"):
        Nf4Quantizer(Nf4Options()).apply(nn.ModuleDict({"up": nn.Linear(5, 7)}), context)


def test_fp8_rounding_is_the_cast_and_saturates() -> None:
    values = torch.cat([_randn(2000) * 100, torch.tensor([448.0, -448.0, 449.0, 1e9, -1e9, 0.0])])
    rounded = round_e4m3(values).float()
    inside = values.abs() <= 448
    assert torch.equal(rounded[inside], values[inside].to(E4M3).float())
    assert torch.equal(rounded[~inside].abs(), torch.full((int((~inside).sum()),), 448.0))


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("activations", ["none", "token", "tensor"])
def test_fp8_linear_multiplies_the_rounded_numbers(granularity: str, activations: str) -> None:
    weight, x, bias = _randn(12, 32), _randn(5, 32, seed=1), _randn(12, seed=2)
    packed, scale = fp8_weight(weight, granularity)
    fixed = x.abs().amax() / 448 if activations == "tensor" else None
    linear = Fp8Linear(packed, scale, bias, activations=activations, input_scale=fixed)
    scale_x = {"none": None, "token": x.abs().amax(1, keepdim=True) / 448, "tensor": fixed}[activations]
    seen = x if scale_x is None else (x / scale_x).to(E4M3).float() * scale_x
    expected = seen.double() @ (packed.double() * scale.double()[:, None]).t() + bias
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_static_fp8_scales_come_from_the_calibration_samples() -> None:
    model = calibration_model("llama")
    samples = torch.randint(0, 90, (3, 16), generator=torch.Generator().manual_seed(0))
    peaks: list[torch.Tensor] = []
    hook = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(
        lambda _, args: peaks.append(args[0].abs().max())
    )
    for sample in samples:
        model(input_ids=sample[None])
    hook.remove()
    context = QuantizerContext(device="cpu", dtype="float32", calibration=samples.tolist)
    Fp8Quantizer(Fp8Options(activations="tensor")).apply(model, context)
    scale = model.model.layers[1].mlp.down_proj.input_scale
    torch.testing.assert_close(scale, torch.stack(peaks).max() / 448)


def test_int8_is_per_channel_and_token() -> None:
    weight, x = _randn(12, 32) * torch.logspace(-2, 1, 12)[:, None], _randn(6, 32, seed=1)
    linear = Int8Linear(*int8_weight(weight), None)
    expected = x @ weight.t()
    assert ((linear(x) - expected).norm(dim=0) / expected.norm(dim=0)).max() < 0.02
    assert torch.equal(linear(x)[2:3], linear(x[2:3])), "a token depends on its company"


def test_hqq_lowers_its_objective_in_every_group() -> None:
    weight = torch.distributions.StudentT(3.0).sample((16, 128))
    settings = HqqSettings(bits=3, group_size=32)
    groups = weight.unflatten(1, (-1, 32))
    grid = fit_grid(groups, 3, False, torch.float32)
    before = group_error(groups, grid.scale, grid.zero, settings)
    result = hqq(weight, settings)
    assert result.zero is not None
    after = group_error(groups, result.scale.float()[..., None], result.zero.float()[..., None], settings)
    assert (after <= before * (1 + 1e-6)).all()
    assert after.sum() < 0.99 * before.sum()
    error = (result.dequantize() - weight).abs().pow(0.7).sum()
    assert error == pytest.approx(float(after.sum()), rel=1e-4), "what is stored is what was measured"
    assert error < (round_groups(weight, 3, 32, False).dequantize() - weight).abs().pow(0.7).sum()
