"""bitsandbytes, torchao and hqq in the quantizer slot: the same numbers as natively, honest reports, guards."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any, Literal, get_args

import pytest
import torch
from infermix.errors import Unsupported, UserError, WrongResult
from infermix.features import match
from infermix.plugins import load_catalogue
from infermix.roles.component import Choice, Role
from infermix.roles.facts import MachineFacts, MatrixFacts, ModelFacts
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.conformance.component import example_model
from infermix.toolkit.linears import FoundLinear
from infermix.toolkit.wrapped_linears import LibraryLinear, LibraryProduct, LibraryQuantizer
from infermix_quant.linear_int8 import LlmInt8Linear, Outliers, int8_weight
from infermix_quant.nf4 import Nf4Linear
from torch import Tensor, nn

CONTEXT = QuantizerContext(device="cpu", dtype="float32")
CATALOGUE = load_catalogue()


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _model(width: int = 128, out: int = 96) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(width, out), "down": nn.Linear(out, width, bias=False)}).requires_grad_(
        False
    )


def _build(name: str, **options: Any) -> Any:
    registered = CATALOGUE.find(Role.QUANTIZER, name)
    if registered.unavailable:
        pytest.skip(registered.unavailable)
    component = registered.component
    return component.build(component.options(**options), None)


def _applied(name: str, model: nn.Module, **options: Any) -> Any:
    return _build(name, **options).apply(model, CONTEXT)


@pytest.mark.parametrize("double_quant", [False, True])
def test_native_nf4_holds_the_numbers_of_bitsandbytes(double_quant: bool) -> None:
    """Equal up to midpoints between two codes, and up to the scales' own 8 bits, whose code is not the same."""
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = _randn(96, 128)
    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=double_quant, quant_type="nf4")
    native = Nf4Linear(weight, None, block_size=64, scale_block=256 if double_quant else None)
    ours, theirs = native.dequantize(torch.float32), dequantize_4bit(packed, state)
    if double_quant:
        assert (ours - theirs).norm() / theirs.norm() < 0.01
    else:
        assert (ours != theirs).float().mean() < 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outliers", ["values", "columns"])
def test_native_llm_int8_multiplies_as_bitsandbytes(outliers: Literal["values", "columns"]) -> None:
    """Outliers of one column: the library takes the column out for all tokens, we also for those that exceed it."""
    weight, x = _randn(96, 128), _randn(6, 128, seed=1)
    x[:, 5] *= 40
    model = nn.ModuleDict({"up": nn.Linear(128, 96, bias=False).requires_grad_(False)})
    model["up"].weight.data = weight.clone()
    _applied("bitsandbytes", model, method="llm_int8")
    native = LlmInt8Linear(*int8_weight(weight), None, 6.0, outliers)
    expected = x @ weight.t()

    def error(out: Tensor) -> float:
        return float((out - expected).norm() / expected.norm())

    assert error(model["up"](x)) == pytest.approx(error(native(x)), rel=0.2)
    assert error(native(x)) < 0.02


def test_columns_are_those_of_bitsandbytes() -> None:
    """The same numbers but for rounding, where the rest of an outlier column does not widen the library's scale."""
    weight, x = _randn(96, 128).half().float(), _randn(6, 128, seed=1).half().float()
    x[:2, ::8], x[2:, ::8] = 30.0, 0.5 * x[2:, ::8]
    model = nn.ModuleDict({"up": nn.Linear(128, 96, bias=False).requires_grad_(False)})
    model["up"].weight.data = weight.clone()
    _applied("bitsandbytes", model, method="llm_int8")
    theirs = model["up"](x)[2:]
    of = {
        kind: float((LlmInt8Linear(*int8_weight(weight), None, 6.0, kind)(x)[2:] - theirs).norm() / theirs.norm())
        for kind in get_args(Outliers)
    }
    assert of["columns"] < 1e-3 < of["values"]


KINDS: list[tuple[str, dict[str, Any], str, float]] = [
    ("bitsandbytes", {"method": "llm_int8"}, "bitsandbytes int8 (torch._int_mm), outlier columns in 16 bits", 8.2917),
    ("bitsandbytes", {"cpu_kernel": "plain"}, "bitsandbytes dequantize+matmul", 4.5),
    (
        "bitsandbytes",
        {"cpu_kernel": "plain", "method": "fp4", "block_size": 32},
        "bitsandbytes dequantize+matmul",
        5.0,
    ),
    ("torchao", {"method": "int8"}, "torchao int8 (product with int8 weights, then scales)", 8.3646),
    ("torchao", {"method": "int4", "group_size": 32}, "torchao int4 (_weight_int4pack_mm_for_cpu)", 6.0),
    ("torchao", {"method": "fp8"}, "torchao fp8 (dequantize+matmul)", 8.2917),
    ("hqq_library", {"group_size": 32}, "hqq dequantize+matmul", 6.0),
]


@pytest.mark.parametrize(("name", "options", "kernel", "bits"), KINDS, ids=[f"{k[0]}-{k[1]}" for k in KINDS])
def test_reports_say_kernel_and_bits(name: str, options: dict[str, Any], kernel: str, bits: float) -> None:
    """Bits as they lie in memory: int8 has a scale of 32 bits per row of 96 or 128 (torchao: and a zero of 8)."""
    model = _model()
    report = _applied(name, model, **options)
    assert set(report.kernels) == {"up", "down"}
    assert set(report.kernels.values()) == {kernel}
    assert report.bits_per_weight == pytest.approx(bits, abs=1e-3)
    held = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in model.buffers()}
    assert report.quantized_bytes == sum(held.values())
    assert 0 < report.details["mean_weight_error"] < 0.12


def test_packed_cpu_weights_of_bitsandbytes_count_as_they_lie_in_memory() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    if not functional.has_avx512bf16():
        pytest.skip("this CPU has no AVX512-BF16")
    model = nn.ModuleDict({"wide": nn.Linear(128, 96), "odd": nn.Linear(128, 7)}).requires_grad_(False)
    report = _applied("bitsandbytes", model, double_quant=True)
    assert report.kernels == {
        "wide": "bitsandbytes gemv_4bit (AVX512-BF16)",
        "odd": "bitsandbytes dequantize+matmul",  # the library's packed form stops at rows in blocks of 32
    }
    assert model["wide"].num_bytes * 8 / (128 * 96) == 4.25


def test_saving_after_a_product_is_refused() -> None:
    """bitsandbytes repacks 4-bit weights at the first product and restores them wrongly in `state_dict`."""
    model = _model()
    _applied("bitsandbytes", model)
    with pytest.raises(Unsupported, match=r"up \(bitsandbytes .*\) cannot be saved"):
        model.state_dict()


def test_the_corruption_that_saving_would_cause() -> None:
    """For real, without our guard: the same module multiplies by other weights once its state has been read."""
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import has_avx512bf16
    from bitsandbytes.nn import Linear4bit

    if not has_avx512bf16():
        pytest.skip("this CPU has no AVX512-BF16")
    module = Linear4bit(128, 96, bias=False, quant_type="nf4", compress_statistics=False).eval().requires_grad_(False)
    module.weight.data *= torch.logspace(-2, 1, 96)[:, None]
    module = module.to("cpu")
    x = _randn(5, 128)
    before = module(x).clone()
    module.state_dict()
    after = module(x)
    assert (after - before).norm() > 0.1 * before.norm(), "fixed upstream: the guard can go"


class _Scrambled(LibraryQuantizer):
    """Four-bit groups whose scales come back transposed (`weights`), or whose product reads them so (`product`)."""

    def __init__(self, where: str) -> None:
        super().__init__(())
        self._where = where

    def make(self, linear: FoundLinear, context: QuantizerContext) -> LibraryProduct:
        groups = linear.weight.detach().unflatten(1, (-1, 32))
        scale = groups.abs().amax(2) / 7
        numbers = torch.round(groups / scale[..., None])
        right = (numbers * scale[..., None]).flatten(1)
        wrong = (numbers * scale.t().reshape(scale.shape)[..., None]).flatten(1)
        used = wrong if self._where == "product" else right
        weight = wrong if self._where == "weights" else right
        return LibraryProduct("scrambled", lambda x: x @ used.t(), weight, lambda: [numbers, scale], 1e-4)


@pytest.mark.parametrize("where", ["weights", "product"])
def test_transposed_scales_are_found(where: str) -> None:
    """What the corruption does, in the weights or in the product alone; rows differ in size as in real models."""
    model = nn.ModuleDict({"up": nn.Linear(128, 96, bias=False).requires_grad_(False)})
    model["up"].weight.data = _randn(96, 128) * torch.logspace(-2, 1, 96)[:, None]
    _Scrambled("nowhere").apply(nn.ModuleDict({"up": model["up"]}), CONTEXT)
    with pytest.raises(WrongResult, match=r"the weights of up are off|with up differs"):
        _Scrambled(where).apply(model, CONTEXT)


@pytest.mark.parametrize("name", ["bitsandbytes", "torchao", "hqq_library"])
def test_weights_that_are_not_finite_are_refused(name: str) -> None:
    model = _model()
    model.get_submodule("down").weight.data[3, 4] = float("nan")
    with pytest.raises(UserError, match="the weights of down are not finite"):
        _applied(name, model)
    assert not any(isinstance(module, LibraryLinear) for module in model.modules())


@pytest.mark.parametrize(("name", "options"), [("torchao", {"method": "int4"}), ("hqq_library", {})])
def test_groups_that_do_not_fit_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="group size 64 does not divide the 96 inputs of down"):
        _applied(name, _model(), **options)


def _problems(name: str, machine: MachineFacts, model: ModelFacts | None = None, **options: Any) -> tuple[str, ...]:
    found = CATALOGUE.find(Role.QUANTIZER, name)
    choice = Choice(found, found.component.options(**options))
    return match({Role.QUANTIZER: choice}, (), model or example_model(), machine).problems


GROUPED: list[tuple[str, dict[str, Any]]] = [
    ("rtn", {}), ("gptq", {}), ("awq", {}), ("hqq", {}), ("hqq_library", {}), ("torchao", {"method": "int4"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), GROUPED, ids=[name for name, _ in GROUPED])
def test_plan_names_group_sizes_that_would_fit(name: str, options: dict[str, Any]) -> None:
    """576 = 9 x 64 inputs; with patterns of one's own, which linears count is known at load only."""
    cpu = MachineFacts("cpu", "this CPU", 2**33, 2)
    narrow = replace(example_model(), matrices=(MatrixFacts("mlp", 576, 512, 2), MatrixFacts("lm_head", 100, 7, 1)))
    (problem,) = _problems(name, cpu, narrow, **options, group_size=128)
    assert "group_size:one that divides 576 inputs (such as 8, 16, 32, 64), not 128" in problem
    assert _problems(name, cpu, narrow, **options, group_size=64) == ()
    assert _problems(name, cpu, narrow, **options, group_size=128, skip=("*proj",)) == ()


def test_plan_refuses_what_the_device_cannot() -> None:
    cpu = MachineFacts("cpu", "this CPU", 2**33, 2)
    old = MachineFacts("cuda", "A100", 2**33, 2, compute_capability=80)
    assert _problems("torchao", cpu) == ()
    assert any("device:cuda" in problem for problem in _problems("torchao", cpu, method="fp8_dynamic"))
    assert any("sm:89" in problem for problem in _problems("torchao", old, method="fp8_dynamic"))
    assert any("device:cuda" in problem for problem in _problems("torchao", cpu, method="int4", group_size=256))
    assert _problems("torchao", cpu, method="int4", group_size=128) == ()
    padded = _problems("torchao", old, method="int4", group_size=128)
    assert any("inputs:512 or more, since rows are padded to 1024, not 256" in problem for problem in padded)


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao", "hqq"])
def test_listing_imports_no_library(package: str) -> None:
    module = importlib.import_module(f"infermix_{package}.plugin")
    (component,) = module.infermix_quantizer()
    assert component.requires == (package,)
    assert component.extra == package
