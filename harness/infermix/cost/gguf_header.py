"""GGUF headers: metadata and tensor list, without reading tensor data.

Layout after https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: magic, version, counts, typed key/value
pairs, tensor infos, padding, data.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infermix.cost.header_cache import cached, sampled_digest
from infermix.cost.tensors import TensorInfo
from infermix.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: Longer arrays (vocabulary, merges) are counted and skipped.
KEPT_ARRAY = 1024

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: ggml type id -> (name, weights per block, bytes per block).
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}


@dataclass(frozen=True)
class GgufHeader:
    """`metadata` without its long arrays, whose lengths are in `array_lengths`."""

    path: Path
    metadata: Mapping[str, Any]
    array_lengths: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]
    digest: str

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises `UserError` naming the file when it is missing, no GGUF, cut short, or of an unknown version or type."""
    if not path.is_file():
        raise UserError("there is no such GGUF file", where=str(path))
    data = cached(path, _parse_file)
    tensors = tuple(TensorInfo(name, tuple(shape), kind, size) for name, shape, kind, size in data["tensors"])
    return GgufHeader(path, data["metadata"], data["array_lengths"], tensors, data["digest"])


def _parse_file(path: Path) -> dict[str, Any]:
    if path.stat().st_size < 24:
        raise _truncated(path, "it is shorter than a GGUF header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        try:
            return _Cursor(buffer, path).parse()
        except struct.error:
            raise _truncated(path, "it ends inside its header") from None
        except UnicodeDecodeError:
            raise _corrupt(path, "a name in its header is no text") from None


def _truncated(path: Path, why: str) -> UserError:
    return UserError(f"the GGUF file is truncated: {why}", where=str(path), hint="download it again")


def _corrupt(path: Path, why: str) -> UserError:
    return UserError(f"not a readable GGUF file: {why}", where=str(path))


class _Cursor:
    """Walks the header of one mapped file."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer, self.path, self.offset, self.size = buffer, path, 0, len(buffer)
        self.lengths: dict[str, int] = {}

    def parse(self) -> dict[str, Any]:
        num_tensors, num_pairs = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._text()
            value = self._value(key, self._scalar("I"))
            if value is not None:
                metadata[key] = value
        tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32)) or 32
        start = -(-self.offset // alignment) * alignment
        self._check_length(tensors, start)
        return {
            "metadata": metadata,
            "array_lengths": self.lengths,
            "tensors": [entry[:4] for entry in tensors],
            "digest": sampled_digest(self.path, self.offset),
        }

    def _preamble(self) -> tuple[int, int]:
        if self.buffer[:4] != MAGIC:
            raise _corrupt(self.path, f"it starts with {self.buffer[:4]!r}, not {MAGIC!r}")
        self.offset = 4
        version = self._scalar("I")
        if version not in VERSIONS:
            raise _corrupt(self.path, f"version {version} (little-endian versions 2 and 3 are read)")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        if max(num_tensors, num_pairs) > self.size:
            raise _corrupt(self.path, f"it claims {num_tensors} tensors and {num_pairs} keys")
        return num_tensors, num_pairs

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def _text(self) -> str:
        length = self._scalar("Q")
        end = self.offset + length
        if end > self.size:
            raise _truncated(self.path, "it ends inside its header")
        text = self.buffer[self.offset : end].decode("utf-8")
        self.offset = end
        return text

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise _corrupt(self.path, f"key {key!r} has the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, key: str) -> list[Any] | None:
        kind, length = self._scalar("I"), self._scalar("Q")
        self.lengths[key] = length
        if length > self.size:
            raise _corrupt(self.path, f"key {key!r} claims {length} elements")
        if length <= KEPT_ARRAY:
            return [self._value(key, kind) for _ in range(length)]
        if kind == _STRING:
            self._skip_texts(length)
        elif kind in _SCALARS:
            self.offset += length * struct.calcsize("<" + _SCALARS[kind])
        else:
            raise _corrupt(self.path, f"key {key!r} is a long array of type {kind}")
        return None

    def _skip_texts(self, count: int) -> None:
        unpack, buffer, offset = struct.Struct("<Q").unpack_from, self.buffer, self.offset
        for _ in range(count):
            offset += 8 + unpack(buffer, offset)[0]
        self.offset = offset

    def _tensor(self) -> tuple[str, list[int], str, int, int]:
        name = self._text()
        dimensions = self._scalar("I")
        if dimensions > 8:
            raise _corrupt(self.path, f"tensor {name!r} has {dimensions} dimensions")
        shape = [self._scalar("Q") for _ in range(dimensions)][::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in _TYPES:
            raise _corrupt(self.path, f"tensor {name!r} has the unknown ggml type {kind}")
        label, block, block_bytes = _TYPES[kind]
        return name, shape, label, math.prod(shape) // block * block_bytes, offset

    def _check_length(self, tensors: list[tuple[str, list[int], str, int, int]], start: int) -> None:
        for name, _, _, size, offset in tensors:
            end = start + offset + size
            if end > self.size:
                raise _truncated(self.path, f"tensor {name!r} ends at byte {end} of {self.size}")
