"""Whether the tensors of a quantized checkpoint are those that its config speaks of: presence, dtype, shape, scheme.

Everything raises `UserError` with the linear's name, or `Unsupported` for a scheme that is well-formed and not read.
`N` outputs, `K` inputs, `G` groups of a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from infermix.errors import Unsupported, UserError
from torch import Tensor

#: What a packed linear consists of, by `quant_method`, besides its bias.
PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale",
        "input_zero_point",
    ),
}  # fmt: skip
_OPTIONAL = ("g_idx", "weight_g_idx", "weight_zero_point", "input_zero_point")
_WORDS = ("qweight", "qzeros", "weight_packed", "weight_zero_point")


@dataclass(frozen=True)
class Stated:
    """What the config says of one linear; `None` where it says nothing. `group_size` -1 or 0: whole rows."""

    bits: int | None
    group_size: int | None
    symmetric: bool | None


def stated(settings: Mapping[str, Any], name: str) -> Stated:
    """GPTQ's `dynamic` overrides single linears (`+:PATTERN` or `PATTERN`); `-:PATTERN` leaves them unquantized."""
    groups = list((settings.get("config_groups") or {}).values())
    if groups:
        weights = groups[0]["weights"] if len(groups) == 1 else {}
        whole = weights.get("strategy") == "channel"
        return Stated(weights.get("num_bits"), -1 if whole else weights.get("group_size"), weights.get("symmetric"))
    own: dict[str, Any] = {}
    for pattern, changes in (settings.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), name):
            own = changes
            break
    return Stated(*(own.get(key, settings.get(key)) for key in ("bits", "group_size", "sym")))


def check_present(name: str, tensors: Mapping[str, Tensor], method: str, where: Path) -> None:
    """All tensors of a linear are there, words are int32 and scales are floating-point numbers."""
    wanted = PARTS[method]
    if method == "compressed-tensors":
        packed = "weight_packed" in tensors or "weight_shape" in tensors
        wanted = ("weight_packed", "weight_scale", "weight_shape") if packed else ("weight", "weight_scale")
    missing = [key for key in wanted if key not in tensors and key not in _OPTIONAL]
    if missing:
        raise _wrong(f"{name} has no {missing[0]}, only {', '.join(sorted(tensors))}", where)
    for key in (key for key in _WORDS if key in tensors):
        if tensors[key].dtype != torch.int32:
            raise _wrong(f"{name}: {key} is {tensors[key].dtype}, not torch.int32", where)
    for key in (key for key in ("scales", "weight_scale", "input_scale") if key in tensors):
        if not tensors[key].is_floating_point():
            raise _wrong(f"{name}: {key} is {tensors[key].dtype}, not a floating-point dtype", where)


def check_groups(
    name: str,
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    width: int,
    groups: int,
    said: Stated,
    where: Path,
) -> None:
    """`shapes`: part -> shape in the file, and as linear and number of groups ask for. `groups` must divide `width`
    and be what the config says.
    """
    for key, (found, expected) in shapes.items():
        if found != expected:
            raise _wrong(f"{name}: {key} is {found} and must be {expected}", where)
    if not groups or width % groups:
        raise _wrong(f"{name}: {groups} groups do not divide {width} inputs", where)
    size = said.group_size if said.group_size and said.group_size > 0 else width
    if said.group_size is not None and size * groups != width:
        raise _wrong(
            f"{name} has groups of {width // groups} inputs and the config says group_size {said.group_size}", where
        )


def check_group_index(name: str, index: Tensor | None, width: int, groups: int, where: Path) -> None:
    """Every column has a group, and all groups are equally large."""
    if index is None:
        return
    inside = index.shape == (width,) and int(index.min()) >= 0 and int(index.max()) < groups
    if not inside or not bool((torch.bincount(index.long(), minlength=groups) == width // groups).all()):
        raise _wrong(f"{name}: its g_idx does not spread {width} inputs over {groups} groups of equal size", where)


def check_zero_points(name: str, zero: Tensor | None, bits: int, said: Stated, where: Path) -> None:
    """`zero` as it was read, `None` for the middle. Symmetric weights have no other: reveals the wrong convention."""
    if not said.symmetric or zero is None:
        return
    middle, found = 2 ** (bits - 1), sorted({int(each) for each in zero.flatten().unique()})
    beside = found in ([middle - 1], [middle + 1])
    raise UserError(
        f"{name}: the config says symmetric weights, whose zero points are all {middle}, and stored is "
        + ", ".join(map(str, found[:4])) + (", ..." if found[4:] else ""),
        where=str(where),
        key="model.source",
        hint="checkpoint_format is the other one of gptq (zero points minus one) and gptq_v2" if beside else None,
    )  # fmt: skip


def check_eight_bits(name: str, tensors: Mapping[str, Tensor], weights: Mapping[str, Any], where: Path) -> None:
    """The stated scheme of weights is a scale per output or one in all, without zero points, of the stored kind."""
    kind = "float" if tensors["weight"].is_floating_point() else "int"
    if weights.get("type", kind) != kind:
        raise _wrong(f"{name}: the config says {weights['type']} weights, stored is {tensors['weight'].dtype}", where)
    if not weights.get("symmetric", True) or _nonzero(tensors.get("weight_zero_point")):
        raise Unsupported(f"{name}: 8-bit weights with zero points are not read")
    count = tensors["weight_scale"].numel()
    strategy = weights.get("strategy") or ("tensor" if count == 1 else "channel")  # several groups of linears
    expected = {"channel": tensors["weight"].shape[0], "tensor": 1}.get(str(strategy))
    if expected is None:
        raise Unsupported(f"{name}: 8-bit weights with a scale per {strategy} are not read")
    if count != expected:
        raise _wrong(f"{name} has {count} scales, and one per {strategy} makes {expected}", where)


def check_activations(name: str, tensors: Mapping[str, Tensor], scheme: Mapping[str, Any], where: Path) -> None:
    """Activations are rounded to the kind of number that the weights are, without zero points."""
    kind = "float" if tensors["weight"].is_floating_point() else "int"
    if (scheme.get("type"), scheme.get("num_bits")) != (kind, 8):
        raise Unsupported(
            f"{name}: {scheme.get('type')}{scheme.get('num_bits')} activations beside {kind}8 weights are not read"
        )
    if not scheme.get("symmetric", True) or _nonzero(tensors.get("input_zero_point")):
        raise Unsupported(f"{name}: activations with zero points are not read")
    if scheme.get("strategy") == "tensor":
        scale = tensors.get("input_scale")
        if scale is None or scale.numel() != 1 or not float(scale) > 0:
            found = "none" if scale is None else scale.flatten()[:4].tolist()
            raise _wrong(f"{name}: static activations need one positive input_scale, found is {found}", where)


def check_plain_dtype(tensor_name: str, dtype: str, where: Path) -> None:
    """`dtype` as safetensors calls it. Integers or FP8 without scales are what is left of a packed linear."""
    if tensor_name.endswith(".weight") and dtype not in ("F64", "F32", "F16", "BF16"):
        raise _wrong(f"{tensor_name} is {dtype} and has no scales", where)


def check_transforms(settings: Mapping[str, Any]) -> None:
    """Schemes that change what the numbers mean."""
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise Unsupported(f"compressed-tensors with sparse weights ({sparse}) are not read")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise Unsupported("compressed-tensors with transforms (rotations) are not read")


def _nonzero(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.float().any())


def _wrong(what: str, where: Path) -> UserError:
    return UserError(what, where=str(where), key="model.source")
