"""Short, readable, unique names of cells."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infermix.errors import UserError
from infermix.spec.experiment import Cell


def collapse(value: Any) -> Any:
    """Undo the expansion of short forms: `{use: paged}` -> `paged`."""
    if isinstance(value, dict) and len(value) == 1:
        (key, only), *_ = value.items()
        return only if key in ("use", "source") else value
    return [collapse(item) for item in value] if isinstance(value, list) else value


def cell_names(points: Sequence[Mapping[str, Any]], digests: Sequence[str], default: str) -> list[str]:
    """One name per point (swept path -> plain value), such as `attention=sdpa,kv=paged[block_size=16]`.

    Whole lists (evaluators that go with a context length, say) are left out where the rest tells the points apart.
    """
    short = [{path: value for path, value in point.items() if not isinstance(value, list)} for point in points]
    names = _names(short, default)
    if len(set(names)) < len(names) or not all(short):
        names = _names(points, default)
    counts = Counter(names)
    return [
        name if counts[name] == 1 else f"{name}~{digest[:6]}" for name, digest in zip(names, digests, strict=True)
    ]


def _names(points: Sequence[Mapping[str, Any]], default: str) -> list[str]:
    labels = _labels({path for point in points for path in point})
    return [
        ",".join(f"{labels[path]}={_text(value)}" for path, value in point.items()) or default for point in points
    ]


def _labels(paths: Iterable[str]) -> dict[str, str]:
    """The last step of a path, or as many of its last steps as tell it from the others."""
    paths = list(paths)
    labels = {path: path.rsplit(".", 1)[-1] for path in paths}
    counts = Counter(labels.values())
    return {path: label if counts[label] == 1 else path for path, label in labels.items()}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        title = str(value.get("use", value.get("source", "")))
        options = ",".join(f"{k}={_text(v)}" for k, v in value.items() if k not in ("use", "source"))
        return (_last(title) + (f"[{options}]" if options else "")) or "none"
    if isinstance(value, list):
        return "+".join(_text(item) for item in value) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return _last(value) if isinstance(value, str) else str(value)


def _last(name: str) -> str:
    """`org/model` and `some/file.gguf` are shown by their last step."""
    return name.rstrip("/").rsplit("/", 1)[-1] or name


def select_cells(cells: Iterable[Cell], pattern: str | None) -> list[Cell]:
    """Cells whose name matches (`*` and `?` only, since names hold brackets); all without a pattern.

    Raises `UserError` when none does.
    """
    cells = list(cells)
    if pattern is None:
        return cells
    compiled = re.compile(fnmatch.translate(pattern.replace("[", "[[]")))
    chosen = [cell for cell in cells if cell.name == pattern or compiled.match(cell.name)]
    if not chosen:
        known = ", ".join(cell.name for cell in cells[:8]) + (", ..." if len(cells) > 8 else "")
        raise UserError(f"no cell matches {pattern!r}", where="--only", hint=f"the cells are: {known}")
    return chosen
