"""Measured launch parameters on disk: one file per machine and family, written in one piece, dropped with the code.

Nothing is measured here, and nothing is measured inside an ordinary call: `infermix_kernels.tune` does it in set-up.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a small number elsewhere, where kernels are only interpreted."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def machine_name(device: torch.device) -> str:
    """Names the file of measured parameters: device, its size, and the compiler that they were measured with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    text = f"{name}-{num_multiprocessors(device)}sm-triton{triton.__version__}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)


@cache
def source_hash() -> str:
    """Of every kernel in this package: what was measured with other code says nothing about this one."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class MeasuredTable:
    """Entries `key -> {"launch": parameters, "seconds": time}` of `directory/<family>-<machine>.json`.

    A file that another version of the kernels wrote, or that is damaged, counts as empty and is replaced by the
    first `store`. Several processes may write: each entry is merged into what the file holds by then.
    """

    def __init__(self, directory: Path, family: str, device: torch.device) -> None:
        self.path = directory / f"{family}-{machine_name(device)}.json"
        self._entries = self._read()

    def get(self, key: str) -> dict[str, Any] | None:
        """The parameters that were stored for a key."""
        entry = self._entries.get(key)
        return None if entry is None else entry["launch"]

    def seconds(self, key: str) -> float | None:
        entry = self._entries.get(key)
        return None if entry is None else entry["seconds"]

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, key: str, launch: dict[str, Any], seconds: float) -> None:
        """Remember parameters and their time; the file is replaced in one piece."""
        self._entries = {**self._read(), **self._entries, key: {"launch": launch, "seconds": seconds}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"source": source_hash(), "entries": self._entries}, file, indent=1, sort_keys=True)
            os.replace(temporary, self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            content = json.loads(self.path.read_text())
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            return {}
        if not isinstance(content, dict) or content.get("source") != source_hash():
            return {}
        entries = content.get("entries")
        return entries if isinstance(entries, dict) else {}
