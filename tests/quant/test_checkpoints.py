"""Checkpoint formats: numbers written by hand, round trips, files made elsewhere, the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.errors import UserError
from infermix.roles.facts import ResolvedSource
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.conformance.quantizer import calibration_model
from infermix_quant.formats import (
    Unsaveable,
    awq_tensors,
    gptq_tensors,
    packed_tensors,
    read_awq,
    read_gptq,
    read_packed,
)
from infermix_quant.grid import Quantized
from infermix_quant.options import AwqOptions, Fp8Options, GptqOptions, Int8Options, SmoothQuantOptions
from infermix_quant.quantizer_checkpoint import CheckpointQuantizer
from infermix_quant.quantizer_gptq import GptqQuantizer
from infermix_quant.quantizers_folded import AwqQuantizer, SmoothQuantQuantizer
from infermix_quant.quantizers_plain import Fp8Quantizer, Int8Quantizer
from infermix_quant.words import pack_awq, pack_rows, unpack_awq, unpack_rows
from safetensors.torch import load_file, save_file

SAMPLES = torch.randint(0, 90, (3, 16), generator=torch.Generator().manual_seed(0)).tolist()
IDS = torch.tensor(SAMPLES)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def test_words_written_by_hand() -> None:
    """Eight 4-bit values, low nibble first; AWQ puts features 0 2 4 6 1 3 5 7 there; 3 bits straddle words."""
    values = torch.arange(1, 9, dtype=torch.uint8)
    assert pack_rows(values[:, None], 4).tolist() == [[_signed(0x87654321)]]
    assert pack_awq(values[None]).tolist() == [[_signed(0x86427531)]]
    three = torch.arange(32, dtype=torch.uint8) % 8
    whole = sum(int(value) << (3 * index) for index, value in enumerate(three.tolist()))
    expected = [[_signed(whole >> (32 * index) & 0xFFFFFFFF)] for index in range(3)]
    assert pack_rows(three[:, None], 3).tolist() == expected


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_round_trip(bits: int) -> None:
    values = torch.randint(0, 2**bits, (64, 5), dtype=torch.uint8)
    assert torch.equal(unpack_rows(pack_rows(values, bits), bits), values)


def test_awq_words_round_trip() -> None:
    values = torch.randint(0, 16, (3, 24), dtype=torch.uint8)
    assert torch.equal(unpack_awq(pack_awq(values)), values)


def _gptq_file(zero_nibble: int) -> dict[str, torch.Tensor]:
    """32 inputs, 8 outputs, one group: every weight is 9, every scale 0.5."""
    return {
        "qweight": torch.full((4, 8), _signed(0x99999999), dtype=torch.int32),
        "qzeros": torch.full((1, 1), _signed(zero_nibble * 0x11111111), dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }


@pytest.mark.parametrize(
    ("v2", "nibble", "weight"), [(False, 7, 0.5), (True, 7, 1.0), (False, 2, 3.0), (True, 8, 0.5)]
)
def test_zero_points_of_both_gptq_versions(v2: bool, nibble: int, weight: float) -> None:
    """Version 1 stores zero points minus one."""
    found = read_gptq(_gptq_file(nibble), bits=4, v2=v2)
    assert torch.equal(found.dequantize(), torch.full((8, 32), weight))


def test_an_awq_file_written_by_hand() -> None:
    """Output feature c has weights c and zero point 3 in every input."""
    tensors = {
        "qweight": torch.full((32, 1), 0x75316420, dtype=torch.int32),
        "qzeros": torch.full((1, 1), 0x33333333, dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    assert torch.equal(read_awq(tensors).dequantize(), (torch.arange(8.0) - 3)[:, None].expand(8, 32))


def test_a_pack_quantized_file_written_by_hand() -> None:
    """Signed integers -8 ... 7 are stored plus eight."""
    tensors = {
        "weight_packed": torch.tensor([[0x76543210, _signed(0xFEDCBA98)]], dtype=torch.int32),
        "weight_scale": torch.ones(1, 1, dtype=torch.float16),
        "weight_shape": torch.tensor([1, 16]),
    }
    assert read_packed(tensors, bits=4).dequantize().tolist() == [list(map(float, range(-8, 8)))]


def _weight(bits: int, symmetric: bool, act_order: bool = False) -> Quantized:
    torch.manual_seed(bits)
    zero = None if symmetric else torch.randint(1, 2**bits, (32, 2), dtype=torch.uint8)
    group = torch.randperm(64) // 32 if act_order else None
    return Quantized(
        torch.randint(0, 2**bits, (32, 64), dtype=torch.uint8), torch.rand(32, 2).half() + 0.1, zero, bits, group
    )


def _same(left: Quantized, right: Quantized) -> bool:
    return torch.equal(left.dequantize(), right.dequantize()) and torch.equal(left.groups(), right.groups())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("v2", [True, False])
def test_gptq_round_trip(bits: int, symmetric: bool, act_order: bool, v2: bool) -> None:
    weight = _weight(bits, symmetric, act_order)
    assert _same(read_gptq(gptq_tensors(weight, v2=v2), bits=bits, v2=v2), weight)


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_and_compressed_round_trip(symmetric: bool) -> None:
    assert _same(read_awq(awq_tensors(_weight(4, symmetric))), _weight(4, symmetric))
    for bits in (4, 8):
        weight = _weight(bits, symmetric, act_order=True)
        assert _same(read_packed(packed_tensors(weight), bits=bits), weight)


def test_what_a_format_cannot_say_is_not_saved() -> None:
    zero = Quantized(torch.zeros(32, 32, dtype=torch.uint8), torch.ones(32, 1).half(), torch.zeros(32, 1).byte(), 4)
    with pytest.raises(Unsaveable, match="no zero point 0"):
        gptq_tensors(zero, v2=False)
    with pytest.raises(Unsaveable):
        awq_tensors(_weight(8, True))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = calibration_model("llama")
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _context(directory: Path | None) -> QuantizerContext:
    return QuantizerContext(
        device="cpu", dtype="float32", calibration=lambda: SAMPLES, model_digest="m", directory=directory
    )


QUANTIZERS: dict[str, Any] = {
    "gptq": lambda: GptqQuantizer(GptqOptions(act_order=True)),
    "gptq-asymmetric": lambda: GptqQuantizer(GptqOptions(bits=3, symmetric=False)),
    "gptq-mixed": lambda: GptqQuantizer(GptqOptions(bits_for={"*down_proj": 8})),
    "awq": lambda: AwqQuantizer(AwqOptions()),
    "smoothquant": lambda: SmoothQuantQuantizer(SmoothQuantOptions()),
    "smoothquant-static": lambda: SmoothQuantQuantizer(SmoothQuantOptions(activations="tensor", observer="mse")),
    "int8": lambda: Int8Quantizer(Int8Options(activations="tensor", observer="percentile")),
    "fp8": lambda: Fp8Quantizer(Fp8Options(activations="tensor")),
}


@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_cached_and_reloaded_models_are_the_same(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized, from the cache, and loaded as a checkpoint made elsewhere: the same logits."""
    from infermix.engine.loader import load_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = calibration_model("llama"), calibration_model("llama")
    report = QUANTIZERS[name]().apply(first, _context(source))
    again = QUANTIZERS[name]().apply(second, _context(source))
    assert report.details["from_cache"] is False
    assert again.details["from_cache"] is True
    assert again.details["quantize_s"] == report.details["quantize_s"] > 0
    assert (again.bits_per_weight, again.kernels, again.method) == (
        report.bits_per_weight,
        report.kernels,
        report.method,
    )
    expected = first(input_ids=IDS).logits
    torch.testing.assert_close(second(input_ids=IDS).logits, expected)
    folder = tmp_path / "cache/infermix/quantized" / report.details["checkpoint"]
    config = json.loads((folder / "config.json").read_text())
    found = ResolvedSource("m", "safetensors", folder, None, config)
    third = load_model(found, None, dtype="float32", device="cpu", packed=True).model  # type: ignore[arg-type]
    read = CheckpointQuantizer(None).apply(third, _context(folder))  # type: ignore[arg-type]
    torch.testing.assert_close(third(input_ids=IDS).logits, expected)  # type: ignore[operator]
    assert read.bits_per_weight == pytest.approx(report.bits_per_weight)


def test_linears_left_out_are_named_for_other_readers(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQModel takes every linear of a layer for quantized, except those of `-:PATTERN` in `dynamic`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = GptqOptions(skip=("*lm_head", "*0.mlp.down_proj"), bits_for={"*1.mlp.up_proj": 8})
    model = calibration_model("llama")
    report = GptqQuantizer(options).apply(model, _context(source))
    folder = tmp_path / "cache/infermix/quantized" / report.details["checkpoint"]
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert settings["dynamic"] == {
        r"-:model\.layers\.0\.mlp\.down_proj$": {},
        r"+:model\.layers\.1\.mlp\.up_proj$": {"bits": 8},
    }
    again = calibration_model("llama")
    CheckpointQuantizer(None).apply(again, _context(folder))  # type: ignore[arg-type]
    torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_other_calibration_other_entry(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = set()
    for samples in (SAMPLES, SAMPLES[:2]):
        context = QuantizerContext(
            device="cpu", dtype="float32", calibration=lambda samples=samples: samples, model_digest="m",
            directory=source,
        )  # fmt: skip
        report = SmoothQuantQuantizer(SmoothQuantOptions()).apply(calibration_model("llama"), context)
        names.add(report.details["checkpoint"])
    assert len(names) == 2


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "infermix_report.json"])
def test_a_damaged_entry_is_made_again_and_the_report_says_so(
    damage: Any, file: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = calibration_model("llama"), calibration_model("llama")
    entry = AwqQuantizer(AwqOptions()).apply(first, _context(source)).details["checkpoint"]
    if (file, damage) == ("infermix_report.json", _flip):
        pytest.skip("the report itself is not digested")
    damage(tmp_path / "cache/infermix/quantized" / entry / file)
    details = AwqQuantizer(AwqOptions()).apply(second, _context(source)).details
    assert details["from_cache"] is False
    assert details["replaced"]
    torch.testing.assert_close(second(input_ids=IDS).logits, first(input_ids=IDS).logits)
    third = AwqQuantizer(AwqOptions()).apply(calibration_model("llama"), _context(source)).details
    assert third["from_cache"] is True


def test_an_entry_whose_report_lacks_a_fact_is_made_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entry = AwqQuantizer(AwqOptions()).apply(calibration_model("llama"), _context(source)).details["checkpoint"]
    path = tmp_path / "cache/infermix/quantized" / entry / "infermix_report.json"
    path.write_text(json.dumps({"files": json.loads(path.read_text())["files"]}))
    details = AwqQuantizer(AwqOptions()).apply(calibration_model("llama"), _context(source)).details
    assert details["replaced"] == "infermix_report.json has no method"


def test_a_full_disk_does_not_cost_what_was_quantized(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibration of a large model takes minutes: the cell runs with it, and the record says that it was not kept."""
    import safetensors.torch

    def full(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("No space left on device (os error 28)")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    report = AwqQuantizer(AwqOptions()).apply(calibration_model("llama"), _context(source))
    assert report.details["checkpoint"] == "not kept: No space left on device (os error 28)"
    assert report.details["quantize_s"] > 0
    assert not list((tmp_path / "cache/infermix/quantized").iterdir())


def _packed(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def packed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = GptqQuantizer(GptqOptions()).apply(calibration_model("llama"), _context(source))
    return tmp_path / "cache/infermix/quantized" / report.details["checkpoint"]


def test_a_config_that_disagrees_with_the_tensors_is_refused(packed: Path) -> None:
    with pytest.raises(UserError, match=r"proj is packed with 4 bits and the config says 8"):
        CheckpointQuantizer(None).apply(calibration_model("llama"), _context(_packed(packed, bits=8)))  # type: ignore[arg-type]


def test_widths_that_disagree_are_refused(packed: Path) -> None:
    model = calibration_model("llama")
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(448, 256, bias=False)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.down_proj .*(448|bits)"):
        CheckpointQuantizer(None).apply(model, _context(packed))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused(packed: Path, bad: float) -> None:
    file = packed / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.scales"][0, 3] = bad
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj: scale is not finite"):
        CheckpointQuantizer(None).apply(calibration_model("llama"), _context(packed))  # type: ignore[arg-type]


def test_an_unknown_method_is_refused(packed: Path) -> None:
    with pytest.raises(UserError, match=r"packed by exotic.*read are: gptq, awq, compressed-tensors"):
        CheckpointQuantizer(None).apply(calibration_model("llama"), _context(_packed(packed, quant_method="exotic")))  # type: ignore[arg-type]


def test_infinite_numbers_beside_the_packed_weights_are_refused(packed: Path) -> None:
    model = calibration_model("llama")
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(UserError, match=r"the weights of model\.norm are not finite"):
        CheckpointQuantizer(None).apply(model, _context(packed))  # type: ignore[arg-type]


def test_biases_of_zeros_are_left_out(packed: Path) -> None:
    """auto-gptq writes biases that the model does not have."""
    file = packed / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("qweight")]:
        tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
    save_file(tensors, file, metadata={"format": "pt"})
    model = calibration_model("llama")
    CheckpointQuantizer(None).apply(model, _context(packed))  # type: ignore[arg-type]
    assert model.model.layers[0].mlp.up_proj.bias is None


def test_packed_weights_are_refused_by_other_quantizers_when_planned(packed: Path) -> None:
    from infermix.cost.model_facts import read_model_facts
    from infermix.features import match
    from infermix.plugins import load_catalogue
    from infermix.roles.component import Choice, Role
    from infermix.roles.facts import MachineFacts

    config = json.loads((packed / "config.json").read_text())
    facts = read_model_facts(ResolvedSource("m", "safetensors", packed, None, config))
    catalogue, machine = load_catalogue(), MachineFacts("cpu", "cpu", 2**33, 2)

    def problems(name: str) -> tuple[str, ...]:
        found = catalogue.find(Role.QUANTIZER, name)
        return match({Role.QUANTIZER: Choice(found, found.component.options())}, (), facts, machine).problems

    assert problems("checkpoint") == ()
    assert "packed by gptq" in problems("none")[0]
