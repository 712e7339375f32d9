"""The tensors of a GGUF file, under the names that transformers gives to the modules they end up in."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from infermix.errors import UserError
from torch import Tensor


class GgufTensors:
    """Names after `gguf.get_tensor_name_map`. Raises `UserError` for an architecture that the package lacks."""

    def __init__(self, file: Path, num_layers: int) -> None:
        reader = gguf.GGUFReader(file)
        field: Any = reader.get_field("general.architecture")
        name = field.contents()
        known = {text: arch for arch, text in gguf.MODEL_ARCH_NAMES.items()}
        if name not in known:
            raise UserError(f"the package gguf knows no architecture {name!r}", where=str(file), key="model.source")
        self._names = gguf.get_tensor_name_map(known[name], num_layers)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def of(self, module: str) -> Any | None:
        """The weight of a module, `None` when the file has none by that name."""
        stem = self._names.get_name(module)
        return self._tensors.get(f"{stem}.weight") if stem else None


def rows_of(tensor: Any) -> Tensor:
    """Its bytes, uint8 `[rows, bytes]`: a copy, since the file is only mapped."""
    data = np.array(tensor.data, dtype=np.uint8)
    return torch.from_numpy(data.reshape(data.shape[0], -1))


def row_order(found: Tensor, wanted: Tensor) -> Tensor | None:
    """Indices that bring the rows of `found` into the order of `wanted`; `None` when they are other rows.

    llama.cpp stores the rows of some projections in another order (rotary pairs side by side) than transformers.
    Rows are compared bit by bit.
    """
    if found.shape != wanted.shape:
        return None
    if torch.equal(found, wanted):
        return torch.arange(found.shape[0])
    places: dict[bytes, list[int]] = defaultdict(list)
    for index, digest in enumerate(_digests(found)):
        places[digest].append(index)
    order = [places[digest].pop() if places[digest] else -1 for digest in _digests(wanted)]
    return None if -1 in order else torch.tensor(order)


def _digests(rows: Tensor) -> list[bytes]:
    array = (rows + 0.0).contiguous().view(torch.uint8).cpu().numpy()  # minus zero becomes zero
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in array]
