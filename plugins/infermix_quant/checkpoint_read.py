"""Quantized linears from a checkpoint, ours or made elsewhere: GPTQ (v1, v2), AWQ GEMM, compressed-tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from infermix.errors import Unsupported, UserError
from infermix.toolkit.linears import FoundLinear
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infermix_quant import checkpoint_checks as checks
from infermix_quant.formats import check_widths, read_awq, read_gptq, read_packed
from infermix_quant.grid import Quantized
from infermix_quant.linear_fp8 import E4M3, Fp8Linear
from infermix_quant.linear_grouped import QuantLinear, make_linear
from infermix_quant.linear_int8 import Int8Linear

#: `quant_method` of the configs that are read here.
METHODS = ("gptq", "awq", "compressed-tensors")


class PackedCheckpoint:
    """A folder with `config.json` and safetensors.

    Raises `UserError` when nothing here reads how it is packed, a file is damaged, or a linear has lost its scales.
    """

    def __init__(self, directory: Path, device: str) -> None:
        self.directory, self.device = directory, device
        self.settings = _settings(directory / "config.json")
        self.method = str(self.settings.get("quant_method", ""))
        if self.method not in METHODS:
            raise UserError(
                f"the weights are packed by {self.method or 'nothing'}", where=str(directory), key="model.source",
                hint="read are: " + ", ".join(METHODS),
            )  # fmt: skip
        checks.check_transforms(self.settings)
        self._files, dtypes = _tensor_files(directory)
        parts = checks.PARTS[self.method]
        stems = (name.rpartition(".")[0] for name in self._files if name.rpartition(".")[2] in parts)
        self.linears = tuple(dict.fromkeys(stems))
        packed = set(self.linears)
        for name, dtype in dtypes.items():
            if name.rpartition(".")[0] not in packed:
                checks.check_plain_dtype(name, dtype, directory)

    def describe(self) -> str:
        bits = self.settings.get("bits") or self.settings.get("format", "")
        return f"checkpoint {self.method} {bits}".strip()

    def plain_tensors(self) -> dict[str, Tensor]:
        """Everything that belongs to no packed linear, and biases."""
        packed = set(self.linears)
        names = [n for n in self._files if n.rpartition(".")[0] not in packed or n.endswith(".bias")]
        return {name: self._tensor(name) for name in names}

    def read(self, linear: FoundLinear) -> QuantLinear:
        """The quantized linear in the place of `linear`, whose weights are not looked at.

        Raises `UserError` when the tensors are not those that the config speaks of, or not finite.
        """
        made = self._linear(linear)
        for name, buffer in made.named_buffers():
            if buffer.is_floating_point() and not bool(buffer.float().isfinite().all()):
                raise UserError(f"{linear.name}: {name} is not finite", where=str(self.directory), key="model.source")
        return made

    def _linear(self, linear: FoundLinear) -> QuantLinear:
        tensors = self._tensors_of(linear.name)
        checks.check_present(linear.name, tensors, self.method, self.directory)
        bias = linear.bias if linear.bias is not None else _needed(tensors.get("bias"))
        if self.method == "compressed-tensors" and "weight_packed" not in tensors:
            return self._eight_bits(linear, tensors, bias)
        weight = self._weight(linear, tensors)
        check_widths(linear.name, weight, linear.out_features, linear.in_features)
        said = checks.stated(self.settings, linear.name)
        checks.check_zero_points(linear.name, weight.zero, weight.bits, said, self.directory)
        return make_linear(weight, bias)

    def _weight(self, linear: FoundLinear, tensors: Mapping[str, Tensor]) -> Quantized:
        if self.method == "awq":
            if str(self.settings.get("version", "gemm")).lower() != "gemm":
                raise Unsupported(
                    f"AWQ checkpoints of version {self.settings['version']!r} are not read, only 'gemm'"
                )
            self._check_bits(linear.name, 4)
            self._check_groups(linear, tensors["scales"], {"qzeros": tensors["qzeros"].t()}, 4)
            return read_awq(tensors)
        packed = tensors["qweight"] if self.method == "gptq" else tensors["weight_packed"].t()
        bits = packed.shape[0] * 32 / linear.in_features
        self._check_bits(linear.name, bits)
        if self.method == "gptq":
            version = str(self.settings.get("checkpoint_format", "gptq"))
            if version not in ("gptq", "gptq_v2"):
                raise Unsupported(f"GPTQ checkpoints of format {version!r} are not read")
            self._check_groups(linear, tensors["scales"], {"qzeros": tensors["qzeros"].t()}, int(bits))
            self._check_index(linear, tensors.get("g_idx"), tensors["scales"].shape[0])
            return read_gptq(tensors, bits=int(bits), v2=version == "gptq_v2")
        if self._activations() != "none":
            raise Unsupported(f"{linear.name}: packed weights with rounded activations are not read")
        zero = tensors.get("weight_zero_point")
        scale = tensors["weight_scale"]
        self._check_groups(linear, scale.t(), {} if zero is None else {"weight_zero_point": zero}, int(bits))
        self._check_index(linear, tensors.get("weight_g_idx"), scale.shape[1])
        return read_packed(tensors, bits=int(bits))

    def _check_groups(self, linear: FoundLinear, scale: Tensor, zeros: Mapping[str, Tensor], bits: int) -> None:
        """`scale [G, N]`, zero points `[N * bits / 32, G]` by their name."""
        groups, words = (scale.shape[0] if scale.dim() else 0), linear.out_features * bits // 32
        shapes = {"scales": (tuple(scale.shape), (groups, linear.out_features))}
        shapes |= {name: (tuple(each.shape), (words, groups)) for name, each in zeros.items()}
        said = checks.stated(self.settings, linear.name)
        checks.check_groups(linear.name, shapes, linear.in_features, groups, said, self.directory)

    def _check_index(self, linear: FoundLinear, index: Tensor | None, groups: int) -> None:
        checks.check_group_index(linear.name, index, linear.in_features, groups, self.directory)

    def _check_bits(self, name: str, bits: float) -> None:
        said = checks.stated(self.settings, name).bits
        if bits not in (2, 3, 4, 8) or (said is not None and int(said) != bits):
            raise UserError(
                f"{name} is packed with {bits:g} bits and the config says {said}",
                where=str(self.directory),
                key="model.source",
            )

    def _eight_bits(self, linear: FoundLinear, tensors: Mapping[str, Tensor], bias: Tensor | None) -> QuantLinear:
        weight, scale = tensors["weight"], tensors["weight_scale"].float().flatten()
        if weight.shape != (linear.out_features, linear.in_features):
            raise UserError(
                f"{linear.name} is {linear.out_features} x {linear.in_features} in the config and "
                f"{' x '.join(map(str, weight.shape))} in the packed weights",
                where=str(self.directory),
                key="model.source",
            )
        groups = list((self.settings.get("config_groups") or {}).values())
        activations = self._activations()
        checks.check_eight_bits(
            linear.name, tensors, groups[0]["weights"] if len(groups) == 1 else {}, self.directory
        )
        if activations != "none":
            checks.check_activations(linear.name, tensors, groups[0]["input_activations"], self.directory)
        fixed = tensors["input_scale"].float().view(()) if activations == "tensor" else None
        if weight.dtype == torch.int8 and activations != "none" and scale.numel() == weight.shape[0]:
            return Int8Linear(weight, scale, bias, fixed)
        if weight.dtype == E4M3:
            return Fp8Linear(weight, scale, bias, activations=activations, input_scale=fixed)
        raise Unsupported(
            f"{linear.name}: {weight.dtype} weights with {scale.numel()} scales and activations per {activations} "
            "are not read"
        )

    def _activations(self) -> str:
        """`none`, `token` (dynamic) or `tensor` (static)."""
        found = {
            json.dumps(group.get("input_activations"), sort_keys=True)
            for group in self.settings.get("config_groups", {}).values()
        }
        if len(found) != 1:
            raise Unsupported(f"{len(found)} schemes of activations in one checkpoint are not read")
        scheme = json.loads(found.pop())
        if scheme is None:
            return "none"
        kind = (scheme.get("strategy"), bool(scheme.get("dynamic")))
        if kind not in (("token", True), ("tensor", False)):
            raise Unsupported(
                f"activations with scales per {kind[0]}, {'dynamic' if kind[1] else 'static'}, are not read"
            )
        return str(kind[0])

    def _tensors_of(self, name: str) -> dict[str, Tensor]:
        start = f"{name}."
        keys = [key for key in self._files if key.startswith(start) and "." not in key[len(start) :]]
        return {key[len(start) :]: self._tensor(key) for key in keys}

    def _tensor(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt", device=self.device) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _settings(config: Path) -> Mapping[str, Any]:
    """`quantization_config`. Raises `UserError` for a config that is missing or no JSON object."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", where=str(config), key="model.source") from error
    if not isinstance(found, dict):
        raise UserError("is no JSON object", where=str(config), key="model.source")
    return found.get("quantization_config") or {}


def _tensor_files(directory: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Tensor name -> file, and -> dtype as safetensors calls it. Raises `UserError` for a damaged file."""
    names: dict[str, Path] = {}
    dtypes: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    names[name], dtypes[name] = path, file.get_slice(name).get_dtype()
        except SafetensorError as error:
            raise UserError(f"is damaged: {error}", where=str(path), key="model.source") from error
    return names, dtypes


def _needed(bias: Tensor | None) -> Tensor | None:
    """Some writers add biases of zeros that the model does not have."""
    return bias if bias is not None and bool(bias.any()) else None
