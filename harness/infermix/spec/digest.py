"""The digest of a resolved experiment: equal digests mean that a stored record answers the same question."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from infermix.spec.experiment import DEFAULT_PARTS, Experiment, Use
from infermix.spec.yaml_marks import KeyPath, dotted

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
        if data["limits"]["kv_swap_bytes"] is None:
            del data["limits"]["kv_swap_bytes"]  # as below
        if not data["transforms"]:
            del data["transforms"]  # records from before there were any stay valid
        data["parts"] = {**_DEFAULT_PARTS, **data["parts"]}
        data["files"] = dict(self._files(experiment))
        data["version"] = EXPERIMENT_VERSION
        return hashlib.sha256(msgspec.json.encode(data, order="deterministic")).hexdigest()

    def data(self, experiment: Experiment) -> dict[str, str]:
        """sha256 of every file that an option names, by the path of the option, such as `workload.path`."""
        return {dotted(path): content for path, _, content in self._named(experiment)}

    def _named(self, experiment: Experiment) -> Iterator[tuple[KeyPath, str, str]]:
        for at, use in _uses(experiment):
            for path, text in _texts(use.options, at):
                content = self._remember(text, whole=True) if "/" in text or "." in text else None
                if content:
                    yield path, text, content

    def _files(self, experiment: Experiment) -> Iterator[tuple[str, str]]:
        for _, text, content in self._named(experiment):
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


def _uses(experiment: Experiment) -> Iterator[tuple[KeyPath, Use]]:
    yield ("workload",), experiment.workload
    yield ("engine",), experiment.engine
    for role, use in experiment.parts.items():
        yield ("parts", role), use
    for key, uses in (("transforms", experiment.transforms), ("quality", experiment.quality)):
        for index, use in enumerate(uses):
            yield (key, index), use


def _texts(value: Any, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, (*at, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*at, index))
