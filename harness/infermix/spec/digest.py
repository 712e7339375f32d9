"""The digest of a resolved experiment: equal digests mean that a stored record answers the same question."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from infermix.spec.experiment import DEFAULT_PARTS, Experiment, Use

#: Raised when the meaning of an experiment changes without its text changing.
EXPERIMENT_VERSION = 1
_CHUNK = 65536
_DEFAULT_PARTS = {role: {"name": name, "options": {}} for role, name in DEFAULT_PARTS.items()}
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".json", ".model")


class Digests:
    """Digests of cells. Files named by options count by content, so a sweep notices that its prompts changed.

    A local checkpoint counts by the names, sizes and first and last 64 KiB of its files. Everything is read once.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._seen: dict[str, str | None] = {}

    def of(self, experiment: Experiment) -> str:
        """sha256 over everything that can change a result; name, folder, baseline and `max_cells` cannot."""
        data = msgspec.to_builtins(experiment)
        for key in ("name", "base", "baseline"):
            del data[key]
        del data["limits"]["max_cells"]
        if not data["transforms"]:
            del data["transforms"]  # records from before there were any stay valid
        data["parts"] = {**_DEFAULT_PARTS, **data["parts"]}
        data["files"] = dict(self._files(experiment))
        data["version"] = EXPERIMENT_VERSION
        return hashlib.sha256(msgspec.json.encode(data, order="deterministic")).hexdigest()

    def _files(self, experiment: Experiment) -> Iterator[tuple[str, str]]:
        uses: list[Use] = [experiment.workload, experiment.engine, *experiment.parts.values()]
        uses += [*experiment.transforms, *experiment.quality]
        for text in {text for use in uses for text in _texts(use.options)}:
            content = self._remember(text, whole=True) if "/" in text or "." in text else None
            if content:
                yield text, content
        weights = self._remember(experiment.model.source, whole=False)
        if weights:
            yield experiment.model.source, weights

    def _remember(self, text: str, *, whole: bool) -> str | None:
        if text not in self._seen:
            self._seen[text] = self._read(text, whole)
        return self._seen[text]

    def _read(self, text: str, whole: bool) -> str | None:
        path = self._base / Path(text).expanduser()
        try:
            if path.is_dir() and not whole:
                files = sorted(each for each in path.iterdir() if each.suffix in _WEIGHTS)
                return hashlib.sha256("".join(f"{f.name}{_ends(f)}" for f in files).encode()).hexdigest()
            if not path.is_file():
                return None
            return _content(path) if whole else _ends(path)
        except (OSError, ValueError, RuntimeError):  # not a path at all, or unreadable: whoever opens it says so
            return None


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _ends(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_CHUNK)
        file.seek(max(0, size - _CHUNK))
        return hashlib.sha256(f"{size}:".encode() + head + file.read(_CHUNK)).hexdigest()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
