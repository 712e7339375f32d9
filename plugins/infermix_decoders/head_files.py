"""Checkpoints of draft heads: a folder with `config.json` and safetensors, published ones or our own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infermix.errors import UserError
from torch import Tensor

#: Names under which heads are published, the first one is how they are written here.
MEDUSA_FILES = ("medusa_lm_head.safetensors", "model.safetensors")
EAGLE_FILES = ("model.safetensors",)
_PICKLES = ("*.pt", "*.pth", "*.bin")


def read_config(folder: Path, key: str) -> dict[str, Any]:
    """`config.json` of the folder. Raises `UserError` where there is none that can be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "infermix train-heads writes such a folder"
        raise UserError(
            "there are no draft heads: the file is missing", where=str(path), key=key, hint=hint
        ) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path), key=key) from None
    if not isinstance(config, dict):
        raise UserError("is no JSON object", where=str(path), key=key)
    return config


def number_of(config: Mapping[str, Any], name: str, folder: Path, default: int | None = None) -> int:
    """A whole number above 0 of the config. Raises `UserError` for another value, or none without a default."""
    value = config.get(name, default)
    if type(value) is not int or value < 1:
        raise UserError(
            f"{name} is {value!r}, expected a whole number above 0", where=str(folder / "config.json"), key=name
        )
    return value


def read_tensors(folder: Path, names: tuple[str, ...], key: str) -> dict[str, Tensor]:
    """All tensors of the first of the files that is there.

    Raises `UserError` where there is none, or a broken one. Pickles are named and refused: reading one runs code.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        pickles = sorted(found.name for pattern in _PICKLES for found in folder.glob(pattern))
        message = f"holds no {names[0]}"
        if pickles:
            message += f", but {pickles[0]}, a pickle: reading one runs whatever code it holds, so none is loaded"
        raise UserError(message, where=str(folder), key=key, hint=f"convert it to safetensors as {names[0]}")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path), key=key) from None


def check_shapes(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], folder: Path, key: str) -> None:
    """Raises `UserError` unless all of `wanted` is there in its shape, as real numbers, and nothing else."""
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted]
    for what, names in (("is missing", missing), ("belongs to no part of it", unknown)):
        if names:
            raise UserError(f"tensor {names[0]!r} {what} ({len(names)} such)", where=str(folder), key=key)
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise UserError(
                f"tensor {name!r} has shape {list(found[name].shape)}, the model needs {list(tensor.shape)}",
                where=str(folder), key=key, hint="these heads were made for another model",
            )  # fmt: skip
        if not found[name].is_floating_point():
            dtype = str(found[name].dtype).removeprefix("torch.")
            raise UserError(
                f"tensor {name!r} holds {dtype}, heads need floating-point numbers", where=str(folder), key=key
            )


def write_heads(folder: Path, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write the folder; what it held under these names is replaced."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    held = {key: tensor.detach().to("cpu").contiguous() for key, tensor in tensors.items()}
    save_file(held, folder / name)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
