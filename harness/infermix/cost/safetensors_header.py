"""Safetensors headers: tensor names, shapes, types and sizes, without reading tensor data.

Layout after https://github.com/huggingface/safetensors: eight bytes of length, a JSON object, data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infermix.cost.header_cache import cached, sampled_digest
from infermix.cost.tensors import TensorInfo
from infermix.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class SafetensorsHeader:
    """All tensors of one checkpoint, whatever number of files it is spread over."""

    files: tuple[Path, ...]
    tensors: tuple[TensorInfo, ...]
    digest: str


def checkpoint_files(directory: Path) -> tuple[Path, ...]:
    """The files of a checkpoint, in order; empty when the directory has none.

    Raises `UserError` when the index names a file that is not there.
    """
    index = directory / INDEX
    if index.is_file():
        return _indexed(directory, index)
    if (directory / SINGLE).is_file():
        return (directory / SINGLE,)
    found = sorted(directory.glob("*.safetensors"))
    if len(found) > 1:
        raise UserError(
            f"holds {len(found)} safetensors files and no {INDEX}",
            where=str(directory),
            hint=f"name the one to use {SINGLE}",
        )
    return tuple(found)


def is_complete(directory: Path) -> bool:
    """Whether the directory holds a whole checkpoint."""
    try:
        return bool(checkpoint_files(directory))
    except UserError:  # some files of the index are not there
        return False


def _indexed(directory: Path, index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError("is no safetensors index with a weight_map", where=str(index)) from None
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UserError(
            f"names {len(names)} files, of which {len(missing)} are missing: {', '.join(missing[:3])}",
            where=str(index),
            hint="download the rest",
        )
    return tuple(directory / name for name in names)


def read_safetensors_header(files: tuple[Path, ...]) -> SafetensorsHeader:
    """Raises `UserError` naming the file that is missing, cut short or not safetensors."""
    tensors: list[TensorInfo] = []
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file():
            raise UserError("there is no such safetensors file", where=str(file))
        data = cached(file, _parse_file)
        tensors += [TensorInfo(name, tuple(shape), kind, size) for name, shape, kind, size in data["tensors"]]
        digest.update(data["digest"].encode())
    return SafetensorsHeader(files, tuple(tensors), digest.hexdigest())


def _parse_file(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _MAX_HEADER:
            raise _corrupt(path, "it has no header length")
        if 8 + length > size:
            raise _truncated(path, "it ends inside its header")
        header = _decode(file.read(length), path)
    entries = [_tensor(name, entry, path) for name, entry in header.items() if name != "__metadata__"]
    end = 8 + length + max((entry[4] for entry in entries), default=0)
    if end > size:
        raise _truncated(path, f"its tensors end at byte {end} of {size}")
    return {"tensors": [entry[:4] for entry in entries], "digest": sampled_digest(path, 8 + length)}


def _decode(text: bytes, path: Path) -> Mapping[str, Any]:
    try:
        header = json.loads(text)
    except ValueError:
        raise _corrupt(path, "its header is no JSON") from None
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is no JSON object")
    return header


def _tensor(name: str, entry: Any, path: Path) -> tuple[str, list[int], str, int, int]:
    try:
        start, end = entry["data_offsets"]
        return name, [int(n) for n in entry["shape"]], str(entry["dtype"]), end - start, end
    except (KeyError, TypeError, ValueError):
        raise _corrupt(path, f"tensor {name!r} lacks shape, dtype or data_offsets") from None


def _truncated(path: Path, why: str) -> UserError:
    return UserError(f"the safetensors file is truncated: {why}", where=str(path), hint="download it again")


def _corrupt(path: Path, why: str) -> UserError:
    return UserError(f"not a readable safetensors file: {why}", where=str(path))
