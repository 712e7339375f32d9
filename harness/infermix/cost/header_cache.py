"""Parsed headers, kept between runs by (path, size, time of change)."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infermix.paths import cache_dir

#: Raise it when the shape of what is cached changes.
FORMAT = 5

_SAMPLES = 16
_SAMPLE_BYTES = 4096


def cached(path: Path, parse: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """`parse(path)`, or what it returned last time for this very file."""
    stat = path.stat()
    identity = f"{FORMAT}\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    return remembered(f"header-{key}.json", lambda: parse(path))


def remembered(file_name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A JSON object of the cache folder `facts`, computed when absent or unreadable; written atomically."""
    target = cache_dir("facts") / file_name
    try:
        known = json.loads(target.read_bytes())
    except (OSError, ValueError):
        known = None
    if isinstance(known, dict):
        return known
    value = compute()
    write_atomically(target, json.dumps(value))
    return value


def write_atomically(target: Path, text: str) -> None:
    """Readers see the old file or the new one, never half of it."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sampled_digest(path: Path, header_bytes: int) -> str:
    """Digest of the header and of sixteen 4 KiB samples of the tensor data: tells fine-tunes apart, reads 64 KiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(header_bytes))
        step = max((size - header_bytes) // _SAMPLES, 1)
        for offset in range(header_bytes, size, step):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
