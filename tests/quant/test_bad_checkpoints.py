"""Quantized checkpoints whose config and tensors do not belong together, and damaged ones: refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.errors import Unsupported, UserError
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.conformance.quantizer import calibration_model
from infermix_quant.options import AwqOptions, Fp8Options, GptqOptions, Int8Options
from infermix_quant.quantizer_checkpoint import CheckpointQuantizer
from infermix_quant.quantizer_gptq import GptqQuantizer
from infermix_quant.quantizers_folded import AwqQuantizer
from infermix_quant.quantizers_plain import Fp8Quantizer, Int8Quantizer
from safetensors.torch import load_file, save_file

SAMPLES = torch.randint(0, 90, (2, 16), generator=torch.Generator().manual_seed(0)).tolist()
UP = "model.layers.1.mlp.up_proj"

QUANTIZERS: dict[str, Callable[[], Any]] = {
    "gptq": lambda: GptqQuantizer(GptqOptions(act_order=True)),
    "awq": lambda: AwqQuantizer(AwqOptions()),
    "int8": lambda: Int8Quantizer(Int8Options(activations="tensor")),
    "fp8": lambda: Fp8Quantizer(Fp8Options(activations="tensor")),
}


def _context(directory: Path) -> QuantizerContext:
    return QuantizerContext(
        device="cpu", dtype="float32", calibration=lambda: SAMPLES, model_digest="m", directory=directory
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind, made once."""
    folder = tmp_path_factory.mktemp("checkpoints")
    calibration_model("llama").save_pretrained(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        made = {
            name: quantizer().apply(calibration_model("llama"), _context(folder / "model"))
            for name, quantizer in QUANTIZERS.items()
        }
    return {name: folder / "infermix/quantized" / report.details["checkpoint"] for name, report in made.items()}


@pytest.fixture
def copy_of(checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(kind: str) -> Path:
        return Path(shutil.copytree(checkpoints[kind], tmp_path / kind))

    return copy


def _read(folder: Path) -> torch.nn.Module:
    model = calibration_model("llama")
    CheckpointQuantizer(None).apply(model, _context(folder))  # type: ignore[arg-type]
    return model


def _change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    whole = {name: each.contiguous() for name, each in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def _change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("gptq", "qweight"), ("gptq", "scales"), ("gptq", "qzeros"), ("awq", "qweight"), ("awq", "scales"),
        ("awq", "qzeros"), ("int8", "weight"), ("int8", "weight_scale"), ("int8", "input_scale"), ("fp8", "weight"),
        ("fp8", "weight_scale"), ("fp8", "input_scale"),
    ],
)  # fmt: skip
def test_a_missing_part_is_named(kind: str, part: str, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of(kind)
    _change_tensors(folder, lambda tensors: tensors.pop(f"{UP}.{part}"))
    with pytest.raises(UserError, match=rf"layers\.1\.mlp\.up_proj.*{part}"):
        _read(folder)


def test_integers_without_any_scale_are_no_weights(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("int8")
    _change_tensors(folder, lambda tensors: [tensors.pop(f"{UP}.{part}") for part in ("weight_scale", "input_scale")])
    with pytest.raises(UserError, match=r"up_proj\.weight is I8 and has no scales"):
        _read(folder)


@pytest.mark.parametrize("kind", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("part", "cut"),
    [
        ("scales", lambda each: each[:2]),
        ("scales", lambda each: each[:3]),
        ("scales", lambda each: each[:, :100]),
        ("scales", lambda each: each[:, :1]),
        ("qzeros", lambda each: each[:, :1]),
        ("qzeros", lambda each: each[:1]),
        ("scales", lambda each: each.to(torch.int32)),
        ("qweight", lambda each: each.float()),
        ("qweight", lambda each: each.to(torch.int16)),
    ],
)
def test_wrong_shapes_and_dtypes_are_named(
    kind: str, part: str, cut: Callable[[torch.Tensor], torch.Tensor], copy_of: Callable[[str], Path]
) -> None:
    folder, name = copy_of(kind), f"{UP}.{part}"
    _change_tensors(folder, lambda tensors: tensors.update({name: cut(tensors[name])}))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj"):
        _read(folder)


@pytest.mark.parametrize(
    "change",
    [lambda each: each[:10], lambda each: each + 50, lambda each: each - 1, lambda each: each * 0],
    ids=["short", "too large", "negative", "uneven"],
)
def test_a_group_index_that_is_none(
    change: Callable[[torch.Tensor], torch.Tensor], copy_of: Callable[[str], Path]
) -> None:
    folder, name = copy_of("gptq"), f"{UP}.g_idx"
    _change_tensors(folder, lambda tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(UserError, match=r"up_proj: its g_idx does not spread 256 inputs over 4 groups"):
        _read(folder)


@pytest.mark.parametrize("kind", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 128}, r"groups of 64 inputs and the config says group_size 128"),
        ({"group_size": -1}, r"groups of 64 inputs and the config says group_size -1"),
        ({"bits": 8}, r"packed with 4 bits and the config says 8"),
    ],
)
def test_what_the_config_says_is_compared(
    kind: str, changes: dict[str, Any], message: str, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(kind)
    _change_config(folder, lambda settings: settings.update(changes))
    with pytest.raises(UserError, match=message):
        _read(folder)


def test_the_other_zero_point_convention_shows_in_symmetric_weights(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("gptq")
    _change_config(folder, lambda settings: settings.update(checkpoint_format="gptq_v2"))
    with pytest.raises(UserError, match=r"zero points are all 8, and stored is 7.*\n?.*gptq_v2"):
        _read(folder)


def test_bits_of_single_linears_are_those_that_dynamic_says(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("gptq")
    _change_config(folder, lambda settings: settings.update(dynamic={r"+:.*\.up_proj$": {"bits": 8}}))
    with pytest.raises(UserError, match=r"up_proj is packed with 4 bits and the config says 8"):
        _read(folder)


def _scheme(part: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda settings: settings["config_groups"]["group_0"][part].update(changes)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_scheme("weights", symmetric=False), "weights with zero points are not read"),
        (_scheme("weights", strategy="block"), "scale per block are not read"),
        (_scheme("input_activations", symmetric=False), "activations with zero points are not read"),
        (_scheme("input_activations", num_bits=4), "4 activations beside .*8 weights are not read"),
        (lambda each: each.update(transform_config={"config_groups": {"R1": {}}}), "transforms"),
        (lambda each: each.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
    ],
)
def test_schemes_that_mean_other_numbers_are_refused(
    kind: str, change: Callable[[dict[str, Any]], Any], message: str, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(kind)
    _change_config(folder, change)
    with pytest.raises(Unsupported, match=message):
        _read(folder)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("part", "value"),
    [("weight_scale", torch.ones(7)), ("input_scale", torch.zeros(1)), ("input_scale", torch.ones(3))],
)
def test_scales_of_8_bits_are_counted(
    kind: str, part: str, value: torch.Tensor, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(kind)
    _change_tensors(folder, lambda tensors: tensors.update({f"{UP}.{part}": value}))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj"):
        _read(folder)


@pytest.mark.parametrize("content", [b"", b"no tensors at all, and longer than a header"])
def test_a_damaged_file_is_named(content: bytes, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("gptq")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors.*is damaged"):
        _read(folder)


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_broken_config_is_named(content: str | None, copy_of: Callable[[str], Path]) -> None:
    path = copy_of("gptq") / "config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        _read(path.parent)


@pytest.mark.parametrize("options", [{}, {"symmetric": False, "act_order": True}, {"group_size": 0, "bits": 8}])
def test_pack_quantized_is_read_back_and_its_activations_are_not_dropped(
    options: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    from infermix_quant.checkpoint_write import save_checkpoint

    given = GptqOptions(**options)
    model = calibration_model("llama")
    GptqQuantizer(given).apply(model, QuantizerContext(device="cpu", dtype="float32", calibration=lambda: SAMPLES))
    settings = {"format": "pack-quantized", "group_size": given.group_size, "symmetric": given.symmetric}
    save_checkpoint(model, tmp_path, checkpoints["gptq"], {**settings, "act_order": given.act_order})
    ids = torch.tensor(SAMPLES)
    torch.testing.assert_close(_read(tmp_path)(input_ids=ids).logits, model(input_ids=ids).logits)
    _change_config(tmp_path, _scheme("weights", group_size=32, strategy="group"))
    with pytest.raises(UserError, match="config says group_size 32"):
        _read(tmp_path)
    eight = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    _change_config(tmp_path, lambda each: each["config_groups"]["group_0"].update(input_activations=eight))
    with pytest.raises((Unsupported, UserError), match="rounded activations"):
        _read(tmp_path)
