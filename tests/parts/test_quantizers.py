"""Round to nearest: error bounds, real packing, bytes, refusals; and what counts as a linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from infermix.errors import UserError
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.linears import QuantizedLinear, find_linears
from infermix_reference.linear_int8_rows import EXPANDED_FROM, Int8RowsLinear
from infermix_reference.quantizer_rtn import RtnQuantizer, round_to_nearest
from torch import nn

CONTEXT = QuantizerContext(device="cpu", dtype="float32")


def _rtn(**changes: object) -> RtnQuantizer:
    given = {"bits": 4, "granularity": "group", "group_size": 32, "symmetric": True, "skip": ("*lm_head",)}
    return RtnQuantizer(**{**given, **changes})  # type: ignore[arg-type]


def _model(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"up": nn.Linear(width, 96), "down": nn.Linear(96, width, bias=False), "lm_head": nn.Linear(width, 10)}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("groups", "per_tensor"), [(1, True), (1, False), (4, False)])
def test_error_is_at_most_half_a_scale(
    dtype: torch.dtype, bits: int, symmetric: bool, groups: int, per_tensor: bool
) -> None:
    torch.manual_seed(1)
    weight = (torch.randn(24, 64) * torch.logspace(-4, 1, 24)[:, None]).to(dtype)
    q, scale, zero = round_to_nearest(
        weight, bits=bits, num_groups=groups, per_tensor=per_tensor, symmetric=symmetric
    )
    linear = QuantizedLinear(q, scale, zero, bits=bits, bias=None)
    error = (linear.dequantize(torch.float32) - weight.float()).abs().view(24, groups, -1)
    half = scale.float()[:, :, None] / 2
    assert (error <= half * (1 + 1e-5)).all()


def test_values_on_the_grid_come_back_exactly() -> None:
    weight = torch.arange(-7, 8).repeat(2, 1).float() / 4
    q, scale, zero = round_to_nearest(weight, bits=4, num_groups=1, per_tensor=False, symmetric=True)
    assert torch.equal(QuantizedLinear(q, scale, zero, bits=4, bias=None).dequantize(torch.float32), weight)


def test_zeros_stay_zeros() -> None:
    for symmetric in (True, False):
        q, scale, zero = round_to_nearest(
            torch.zeros(2, 8), bits=4, num_groups=2, per_tensor=False, symmetric=symmetric
        )
        assert not QuantizedLinear(q, scale, zero, bits=4, bias=None).dequantize(torch.float32).any()


@pytest.mark.parametrize(
    ("changes", "bits"),
    [
        ({}, 4 + 16 / 32),
        ({"symmetric": False}, 4 + 24 / 32),
        ({"bits": 8, "group_size": 16}, 8 + 16 / 16),
        ({"bits": 8, "granularity": "tensor"}, 8 + 2 * 16 / (2 * 64 * 96)),
        ({"bits": 8, "granularity": "channel"}, 8 + 16 * (64 + 96) / (2 * 64 * 96)),
    ],
)
def test_bits_per_weight_include_scales_and_zero_points(changes: dict[str, object], bits: float) -> None:
    model = _model()
    report = _rtn(**changes).apply(model, CONTEXT)
    assert report.bits_per_weight == pytest.approx(bits, rel=1e-12)
    assert report.quantized_bytes * 8 == pytest.approx(bits * 2 * 64 * 96)
    assert dict(report.kernels) == {"up": "dequantize+matmul", "down": "dequantize+matmul"}
    assert report.skipped == ("lm_head",)


def test_group_size_that_does_not_fit_names_layer_width_and_sizes() -> None:
    model = _model(width=72)
    with pytest.raises(
        UserError, match=r"group size 64 does not divide the 72 inputs of up.*sizes that fit: 8, 24, 72"
    ):
        _rtn(group_size=64).apply(model, CONTEXT)
    assert isinstance(model.get_submodule("up"), nn.Linear), "the model was changed before the refusal"


def test_smollm2_widths() -> None:
    """576 = 9 x 64: 64 and 32 fit, 128 does not."""
    model = nn.ModuleDict({"q_proj": nn.Linear(576, 8)})
    with pytest.raises(UserError, match=r"32.*64"):
        _rtn(group_size=128).apply(model, CONTEXT)
    _rtn(group_size=64).apply(model, CONTEXT)


def test_nothing_to_quantize_is_an_error() -> None:
    with pytest.raises(UserError, match="no linear"):
        _rtn(skip=("*",)).apply(_model(), CONTEXT)


def test_linears_that_share_a_weight_are_left_alone() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False), "other": nn.Linear(8, 8)}
    )
    model["head"].weight = model["embed"].weight
    found, skipped = find_linears(model)
    assert [linear.name for linear in found] == ["other"]
    assert skipped == ("embed", "head")


def test_subclasses_and_fused_weights_are_reported() -> None:
    class Special(nn.Linear):
        pass

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 4, 8))

    found, skipped = find_linears(nn.ModuleDict({"special": Special(4, 4), "experts": Experts()}))
    assert found == []
    assert skipped == ("special", "experts.gate_up_proj")


def test_gpt2_conv1d_is_a_transposed_linear() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.ModuleDict({"c_attn": Conv1D(12, 32)})
    x = torch.randn(3, 32)
    with torch.no_grad():
        before = model["c_attn"](x)
        _rtn(bits=8).apply(model, CONTEXT)
        after = model["c_attn"](x)
    assert isinstance(model["c_attn"], QuantizedLinear)
    assert after.shape == (3, 12)
    assert ((after - before).norm() / before.norm()).item() < 0.01


@pytest.mark.parametrize("rows", [1, 2, 7, EXPANDED_FROM - 1, EXPANDED_FROM, 40])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (1, 32), (33, 576), (576, 96)])
@pytest.mark.parametrize("bias", [True, False])
def test_int8_rows_on_a_cpu_are_the_rounded_weights_product(
    rows: int, out_features: int, in_features: int, bias: bool
) -> None:
    """Inputs and weights are exact; the sum is rounded to bf16 once, the bias once more (2 ** -9 each)."""
    torch.manual_seed(rows)
    linear = nn.Linear(in_features, out_features, bias=bias).to(torch.bfloat16)
    model = nn.ModuleDict({"up": linear})
    report = _rtn(bits=8, granularity="channel").apply(model, QuantizerContext(device="cpu", dtype="bfloat16"))
    made = model["up"]
    assert isinstance(made, Int8RowsLinear)
    assert dict(report.kernels) == {"up": made.kernel}
    assert report.quantized_bytes == out_features * (in_features + 2)
    q, scale, _ = round_to_nearest(linear.weight, bits=8, num_groups=1, per_tensor=False, symmetric=True)
    meaning = (q.double() - 128) * scale.double()
    x = torch.randn(rows, in_features).to(torch.bfloat16)
    expected = x.double() @ meaning.t() + (0 if linear.bias is None else linear.bias.double())
    magnitude = x.double().abs() @ meaning.abs().t() + 1
    # From EXPANDED_FROM on every weight is rounded to bf16 as well.
    assert ((made(x).double() - expected).abs() <= 3 * 2**-9 * magnitude).all()
    assert torch.equal(made(x[None])[0], made(x))
    assert ((made.dequantize(torch.float32).double() - meaning).abs() == 0).all()


def test_int8_rows_depend_on_no_company() -> None:
    model = nn.ModuleDict({"up": nn.Linear(64, 96).to(torch.bfloat16)})
    _rtn(bits=8, granularity="channel").apply(model, QuantizerContext(device="cpu", dtype="bfloat16"))
    x = torch.randn(EXPANDED_FROM - 1, 64).to(torch.bfloat16)
    together, alone = model["up"](x), torch.cat([model["up"](row[None]) for row in x])
    assert torch.equal(together, alone)


def test_int8_rows_take_what_other_linears_take() -> None:
    """No rows at all, rows that lie apart, leading dimensions, numbers of another dtype."""
    model = nn.ModuleDict({"up": nn.Linear(64, 96).to(torch.bfloat16)})
    _rtn(bits=8, granularity="channel").apply(model, QuantizerContext(device="cpu", dtype="bfloat16"))
    up = model["up"]
    assert isinstance(up, Int8RowsLinear)
    wide = torch.randn(3, 2, 200).to(torch.bfloat16)
    assert up(wide[:0, :, :64]).shape == (0, 2, 96)
    assert torch.equal(up(wide[:, :, 100:164]), up(wide[:, :, 100:164].contiguous()))
    exact = F.linear(wide[..., :64].float(), up.dequantize(torch.float32), up.bias.float())
    up.bias = nn.Parameter(up.bias.float())
    torch.testing.assert_close(up(wide[..., :64].float()), exact)
    wide[1, 1, 3] = float("nan")
    assert up(wide[..., :64]).isnan().any(-1).tolist() == [[False, False], [False, True], [False, False]]


@pytest.mark.parametrize(
    ("changes", "width", "dtype"),
    [
        ({}, 72, torch.bfloat16),  # no whole vectors
        ({}, 64, torch.float32),
        ({"symmetric": False}, 64, torch.bfloat16),
        ({"granularity": "tensor"}, 64, torch.bfloat16),
        ({"bits": 4}, 64, torch.bfloat16),
    ],
)
def test_what_torch_has_no_int8_product_for_is_expanded(
    changes: dict[str, object], width: int, dtype: torch.dtype
) -> None:
    model = nn.ModuleDict({"up": nn.Linear(width, 96).to(dtype)})
    context = QuantizerContext(device="cpu", dtype=str(dtype).removeprefix("torch."))
    report = _rtn(**{"bits": 8, "granularity": "channel", **changes}).apply(model, context)
    assert dict(report.kernels) == {"up": "dequantize+matmul"}
    assert isinstance(model["up"], QuantizedLinear)
