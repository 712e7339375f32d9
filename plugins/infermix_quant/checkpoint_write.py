"""A quantized model as a standard checkpoint: safetensors, `config.json` that says how it is packed, tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from infermix_quant.formats import Unsaveable, awq_tensors, gptq_tensors, packed_tensors
from infermix_quant.linear_fp8 import Fp8Linear
from infermix_quant.linear_grouped import GroupedLinear, QuantLinear
from infermix_quant.linear_int8 import Int8Linear

WEIGHTS, CONFIG = "model.safetensors", "config.json"
#: Copied beside the weights as they are.
_BESIDE = ("*token*", "vocab*", "merges*", "special_tokens_map.json", "generation_config.json", "chat_template*")


def quantized_linears(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def save_checkpoint(model: nn.Module, directory: Path, source: Path, settings: Mapping[str, Any]) -> None:
    """Write `model` into the existing folder `directory`; config and tokenizer come from `source`.

    `settings` are the options of the method, for the config. Raises `Unsaveable` when no format holds some linear.
    """
    from safetensors.torch import save_file

    linears = quantized_linears(model)
    form = _Format.of(linears, settings)
    tensors = {f"{name}.{key}": value for name, each in linears.items() for key, value in form.encode(each).items()}
    tensors.update(_plain_tensors(model, linears))
    contiguous = {name: value.detach().to("cpu").contiguous() for name, value in tensors.items()}
    save_file(contiguous, directory / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    config["quantization_config"] = form.config(model, linears)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for pattern in _BESIDE:
        for path in source.glob(pattern):
            shutil.copy(path, directory / path.name)


def _plain_tensors(model: nn.Module, linears: Mapping[str, QuantLinear]) -> dict[str, Tensor]:
    """Everything that is not quantized; of tensors that share memory the first, as transformers ties them again."""
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict().items():
        owner, _, last = name.rpartition(".")
        if (owner in linears and last != "bias") or value.data_ptr() in seen:
            continue
        seen.add(value.data_ptr())
        kept[name] = value
    return kept


class _Format:
    """How linears become tensors, and what the config says about it."""

    @staticmethod
    def of(linears: Mapping[str, QuantLinear], settings: Mapping[str, Any]) -> _Format:
        if all(type(each) is Int8Linear for each in linears.values()):
            return _Int8Format()
        if all(isinstance(each, Fp8Linear) for each in linears.values()):
            return _Fp8Format()
        if not all(isinstance(each, GroupedLinear) for each in linears.values()):
            names = sorted({type(each).__name__ for each in linears.values()})
            raise Unsaveable(f"no standard format holds {', '.join(names)}")
        kinds = {"gptq": _GptqFormat, "awq": _AwqFormat, "pack-quantized": _PackedFormat}
        kind = kinds[settings["format"]]
        return _GptqV2Format(settings) if kind is _GptqFormat and _has_zero_point_0(linears) else kind(settings)

    def encode(self, linear: Any) -> dict[str, Tensor]:
        raise NotImplementedError

    def config(self, model: nn.Module, linears: Mapping[str, QuantLinear]) -> dict[str, Any]:
        raise NotImplementedError


class _GroupedFormat(_Format):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @property
    def group_size(self) -> int:
        return self.settings["group_size"] or -1


class _GptqFormat(_GroupedFormat):
    """The first version, which is read everywhere."""

    v2 = False

    def encode(self, linear: Any) -> dict[str, Tensor]:
        return gptq_tensors(linear.unpacked(), v2=self.v2)

    def config(self, model: nn.Module, linears: Mapping[str, QuantLinear]) -> dict[str, Any]:
        bits = self.settings["bits"]
        other: dict[str, dict[str, int]] = {
            f"+:{re.escape(name)}$": {"bits": each.bits}
            for name, each in linears.items()
            if isinstance(each, GroupedLinear) and each.bits != bits
        }
        left = (name for name in _unquantized(model, linears) if name != "lm_head")  # which has a key of its own
        other.update({f"-:{re.escape(name)}$": {} for name in left})
        return {
            "quant_method": "gptq", "bits": bits, "group_size": self.group_size, "sym": self.settings["symmetric"],
            "desc_act": bool(self.settings.get("act_order")), "lm_head": "lm_head" in linears,
            "checkpoint_format": "gptq_v2" if self.v2 else "gptq", **({"dynamic": other} if other else {}),
        }  # fmt: skip


def _has_zero_point_0(linears: Mapping[str, QuantLinear]) -> bool:
    zeros = [each.zero for each in linears.values() if isinstance(each, GroupedLinear) and each.zero is not None]
    return any(not zero.is_floating_point() and bool((zero == 0).any()) for zero in zeros)


class _GptqV2Format(_GptqFormat):
    """For zero points of 0, which the first version cannot say."""

    v2 = True


class _AwqFormat(_GroupedFormat):
    def encode(self, linear: Any) -> dict[str, Tensor]:
        return awq_tensors(linear.unpacked())

    def config(self, model: nn.Module, linears: Mapping[str, QuantLinear]) -> dict[str, Any]:
        return {
            "quant_method": "awq", "bits": 4, "group_size": self.group_size, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": _unquantized(model, linears) or None,
        }  # fmt: skip


class _CompressedFormat(_Format):
    """compressed-tensors with one group of linears. `scheme` is the weights' and the activations' scheme."""

    name = ""

    def scheme(self, linears: Mapping[str, QuantLinear]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        raise NotImplementedError

    def config(self, model: nn.Module, linears: Mapping[str, QuantLinear]) -> dict[str, Any]:
        weights, activations = self.scheme(linears)
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": activations,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors", "format": self.name, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": _unquantized(model, linears), "kv_cache_scheme": None,
        }  # fmt: skip


class _PackedFormat(_CompressedFormat):
    name = "pack-quantized"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    def encode(self, linear: Any) -> dict[str, Tensor]:
        return packed_tensors(linear.unpacked())

    def scheme(self, linears: Mapping[str, QuantLinear]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        bits = {each.bits for each in linears.values() if isinstance(each, GroupedLinear)}
        if len(bits) > 1:
            raise Unsaveable("linears of several bits need a group each")
        size = self.settings["group_size"]
        weights = _scheme("int", bits.pop(), "group" if size else "channel", symmetric=self.settings["symmetric"])
        order = "group" if self.settings.get("act_order") and not self.settings.get("static_groups") else None
        return {**weights, "group_size": size or None, "actorder": order}, None


class _Int8Format(_CompressedFormat):
    name = "int-quantized"

    def encode(self, linear: Any) -> dict[str, Tensor]:
        fixed = {} if linear.input_scale is None else {"input_scale": linear.input_scale.view(1)}
        return {"weight": linear.weight, "weight_scale": linear.weight_scale[:, None], **fixed}

    def scheme(self, linears: Mapping[str, QuantLinear]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        kinds = {each.activations for each in linears.values() if isinstance(each, Int8Linear)}
        if len(kinds) > 1:
            raise Unsaveable("linears of several schemes need a group each")
        activations = kinds.pop()
        return _scheme("int", 8, "channel"), _scheme("int", 8, activations, dynamic=activations == "token")


class _Fp8Format(_CompressedFormat):
    name = "float-quantized"

    def encode(self, linear: Any) -> dict[str, Tensor]:
        scale = linear.weight_scale[:, None] if linear.weight_scale.numel() > 1 else linear.weight_scale
        fixed = {} if linear.input_scale is None else {"input_scale": linear.input_scale.view(1)}
        return {"weight": linear.weight, "weight_scale": scale, **fixed}

    def scheme(self, linears: Mapping[str, QuantLinear]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        found = [each for each in linears.values() if isinstance(each, Fp8Linear)]
        kinds = {(each.activations, each.weight_scale.numel() > 1) for each in found}
        if len(kinds) > 1:
            raise Unsaveable("linears of several schemes need a group each")
        activations, per_channel = kinds.pop()
        weights = _scheme("float", 8, "channel" if per_channel else "tensor")
        if activations == "none":
            return weights, None
        return weights, _scheme("float", 8, str(activations), dynamic=activations == "token")


def _scheme(kind: str, bits: int, strategy: str, *, symmetric: bool = True, dynamic: bool = False) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": symmetric, "dynamic": dynamic}


def _unquantized(model: nn.Module, linears: Mapping[str, QuantLinear]) -> list[str]:
    """Names of the linears that stay as they are."""
    return [name for name, module in model.named_modules() if type(module) is nn.Linear and name not in linears]
