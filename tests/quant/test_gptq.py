"""GPTQ against plain rounding, against the explicit OBQ update, and through a model."""

from __future__ import annotations

import pytest
import torch
from infermix.errors import UserError
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.conformance.quantizer import calibration_model
from infermix.toolkit.packed_columns import pack_columns, unpack_columns
from infermix_quant.gptq import GptqSettings, gptq, output_error
from infermix_quant.grid import fit_grid, round_groups
from infermix_quant.linear_grouped import GroupedLinear
from infermix_quant.options import GptqOptions
from infermix_quant.quantizer_gptq import GptqQuantizer

SAMPLES = torch.randint(0, 90, (4, 32), generator=torch.Generator().manual_seed(0)).tolist()


def _correlated(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) * torch.logspace(0, -2, width)
    return torch.randn(rows, width, generator=generator) @ mix


def _weight(features: int, width: int) -> torch.Tensor:
    return torch.randn(features, width, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("columns", [1, 5, 64, 67])
def test_packing_round_trip(bits: int, columns: int) -> None:
    q = torch.randint(0, 2**bits, (3, columns), dtype=torch.uint8)
    packed = pack_columns(q, bits)
    assert torch.equal(unpack_columns(packed, bits, columns), q)
    assert packed.shape[1] <= -(-columns * bits // 8) + 1


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("act_order", "static_groups"), [(False, False), (True, False), (True, True)])
def test_error_is_below_rounding_on_correlated_inputs(
    bits: int, symmetric: bool, act_order: bool, static_groups: bool
) -> None:
    x, weight = _correlated(300, 64), _weight(24, 64)
    gram = x.t() @ x
    settings = GptqSettings(bits, 16, symmetric, act_order=act_order, static_groups=static_groups, block_size=24)
    error = output_error(weight, gptq(weight, gram, settings).dequantize(), gram)
    plain = output_error(weight, round_groups(weight, bits, 16, symmetric).dequantize(), gram)
    assert error < plain * (0.8 if bits < 8 else 0.9)


def test_uncorrelated_inputs_leave_plain_rounding() -> None:
    weight = _weight(8, 32)
    result = gptq(weight, torch.eye(32) * 5, GptqSettings(4, 8, True))
    assert torch.equal(result.q, round_groups(weight, 4, 8, True).q)


def test_one_row_equals_the_explicit_obq_update() -> None:
    """Remove one column at a time from the inverse Hessian (Frantar and Alistarh, OBC, 2022)."""
    x, weight = _correlated(64, 12), _weight(1, 12)
    gram, damping = x.t() @ x, 0.01
    damped = gram + damping * gram.diagonal().mean() * torch.eye(12)
    grid, work = fit_grid(weight, 4, True, torch.float32), weight.clone().double()
    inverse = torch.linalg.inv(damped.double())
    expected = []
    for column in range(12):
        integer = grid.integers(work[:, column : column + 1].float())
        expected.append(int(integer))
        error = (work[0, column] - grid.values(integer).double()) / inverse[column, column]
        work -= error * inverse[column]
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    for block_size in (1, 5, 128):
        result = gptq(weight, gram, GptqSettings(4, 12, True, damping=damping, block_size=block_size))
        assert result.q[0].tolist() == expected


def test_act_order_keeps_columns_where_they_belong() -> None:
    """The linear that sorts its columns computes what the matrix in x's order computes."""
    x, weight = _correlated(100, 32), _weight(6, 32)
    result = gptq(weight, x.t() @ x, GptqSettings(4, 8, False, act_order=True))
    linear = GroupedLinear(result, None)
    assert linear.order is not None
    torch.testing.assert_close(linear(x), x @ result.dequantize().t(), rtol=1e-4, atol=1e-4)
    assert (weight - result.dequantize()).abs().mean() < 0.3 * weight.abs().mean()


def test_columns_that_never_fire_are_rounded_plainly() -> None:
    x, weight = _correlated(100, 16), _weight(4, 16)
    x[:, 3] = 0
    result = gptq(weight, x.t() @ x, GptqSettings(8, 16, True))
    assert torch.isfinite(result.dequantize()).all()
    assert (result.dequantize() - weight)[:, 3].abs().max() < weight.abs().max() / 64


def test_degenerate_activations_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"q_proj are degenerate.*damping"):
        gptq(_weight(2, 4), torch.full((4, 4), float("nan")), GptqSettings(4, 4, True), "q_proj")


@pytest.mark.parametrize("sequential", ["layer", "operator"])
def test_a_model_keeps_its_logits_and_reports_what_it_did(sequential: str) -> None:
    model = calibration_model("llama")
    ids = torch.tensor(SAMPLES)
    before = model(input_ids=ids).logits
    options = GptqOptions(bits=4, group_size=64, bits_for={"*down_proj": 8}, sequential=sequential)  # type: ignore[arg-type]
    context = QuantizerContext(device="cpu", dtype="float32", calibration=lambda: SAMPLES)
    report = GptqQuantizer(options).apply(model, context)
    after = model(input_ids=ids).logits
    assert ((after - before).norm() / before.norm()).item() < 0.12
    assert len(report.kernels) == 14
    down = 2 * 512 * 256 / (2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512))
    assert report.bits_per_weight == pytest.approx(4 + 4 * down + 16 / 64)
    assert 0 < report.details["mean_output_error"] < 0.05


def test_a_layer_that_no_sample_reaches_is_named() -> None:
    model = calibration_model("llama")
    model.model.layers[1].self_attn.spare = torch.nn.Linear(256, 8)
    context = QuantizerContext(device="cpu", dtype="float32", calibration=lambda: SAMPLES)
    with pytest.raises(UserError, match=r"no calibration sample reaches model\.layers\.1\.self_attn\.spare"):
        GptqQuantizer(GptqOptions()).apply(model, context)


class _Experts(torch.nn.Module):
    """Two matrices of their own: even token ids are multiplied by one, odd ones by the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(3))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, odd = torch.zeros_like(rows), torch.arange(rows.shape[0]) % 2 == 1
        chosen = [odd, ~odd, torch.zeros_like(odd)] if bool(rows[0, 0] > 0) else [torch.zeros_like(odd), ~odd, ~odd]
        for expert, mask in zip(self.experts, chosen, strict=True):
            out[mask] += expert(rows[mask])
        return out.view_as(x)


def _expert_model(signs: list[int]) -> tuple[torch.nn.Module, list[list[int]]]:
    """Samples whose first token chooses experts 0 and 1 (positive) or 1 and 2."""
    model = calibration_model("llama")
    model.model.layers[0].mlp = _Experts()
    model.model.layers[0].post_attention_layernorm = torch.nn.Identity()
    weight = model.model.embed_tokens.weight.data
    weight[5, 0], weight[6, 0] = 50.0, -50.0
    return model, [[5 if sign > 0 else 6, *sample[1:]] for sign, sample in zip(signs, SAMPLES, strict=False)]


def test_experts_that_only_later_samples_reach_are_calibrated_on_those() -> None:
    model, samples = _expert_model([1, -1])
    context = QuantizerContext(device="cpu", dtype="float32", calibration=lambda: samples)
    report = GptqQuantizer(GptqOptions()).apply(model, context)
    assert {f"model.layers.0.mlp.experts.{index}" for index in range(3)} <= set(report.kernels)


def test_an_expert_that_gets_no_token_is_named() -> None:
    model, samples = _expert_model([1, 1])
    context = QuantizerContext(device="cpu", dtype="float32", calibration=lambda: samples)
    with pytest.raises(UserError, match=r"no calibration sample reaches model\.layers\.0\.mlp\.experts\.2"):
        GptqQuantizer(GptqOptions()).apply(model, context)


def test_bad_weights_and_patterns_are_refused() -> None:
    context = QuantizerContext(device="cpu", dtype="float32", calibration=lambda: SAMPLES)
    model = calibration_model("llama")
    with pytest.raises(UserError, match=r"no quantized linear matches 'nothing\*'"):
        GptqQuantizer(GptqOptions(bits_for={"nothing*": 8})).apply(model, context)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.up_proj are not finite"):
        GptqQuantizer(GptqOptions()).apply(model, context)
