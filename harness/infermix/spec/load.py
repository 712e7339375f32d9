"""From an experiment file to its cells.

Relative paths inside an experiment start from the folder of the file that was asked for, also when they come from
a file that it extends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import overload

import msgspec

from infermix.errors import nearest
from infermix.spec.cells import Row, Settings, build_cells, completed
from infermix.spec.document import read_document
from infermix.spec.experiment import Cell, Limits
from infermix.spec.fields import FIELD_TYPES, RESERVED, SWEEPABLE, TOP_LEVEL, check
from infermix.spec.naming import collapse, select_cells
from infermix.spec.sweep import RAISE_LIMIT, Pattern, Point, SweepReader, assign, pick, too_many
from infermix.spec.validate import Report, check_value, shown
from infermix.spec.yaml_marks import KeyPath, Node

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]*")
_LONGEST_NAME = 120
_REQUIRED = {"model": "source", "workload": "use"}


@dataclass(frozen=True)
class Sweep(Sequence[Cell]):
    """The cells of one experiment file, and where each of their values was written."""

    cells: tuple[Cell, ...]
    document: Node
    origins: Mapping[int, Point] = field(default_factory=dict)

    @overload
    def __getitem__(self, index: int) -> Cell: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Cell]: ...
    def __getitem__(self, index: int | slice) -> Cell | Sequence[Cell]:
        return self.cells[index]

    def __len__(self) -> int:
        return len(self.cells)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self.cells)

    def only(self, pattern: str | None) -> Sweep:
        """The cells whose name matches a glob. Raises `UserError` when none does."""
        return replace(self, cells=tuple(select_cells(self.cells, pattern)))

    def locate(self, cell: Cell, path: KeyPath, *, key: bool = False) -> str:
        """`file:line:column` of what a cell has at `path`, such as `("parts", "kv", "block_size")`."""
        point = self.origins.get(cell.index, {})
        for length in range(len(path), 0, -1):
            assigned = point.get(tuple(str(step) for step in path[:length]))
            if assigned is not None:
                return str(assigned.node.locate(path[length:], key=key))
        return str(self.document.locate(path, key=key))


def load_experiment(path: str | Path, sets: Sequence[str] = ()) -> Sweep:
    """Every cell of an experiment file, `sets` (`a.b=value`) laid over it.

    Raises `UserErrors` with file, line and column for all faults at once.
    """
    path = Path(path)
    document = read_document(path, sets)
    report = Report(lambda at, key=False: str(document.locate(at, key=key)))
    _check_document(document, path, report)
    report.raise_any()
    return _expand(document, path, report)


def _check_document(document: Node, path: Path, report: Report) -> None:
    for key, node in document.value.items():
        if key in RESERVED:
            report.add((key,), "is reserved for a later version and does nothing yet", "remove it", key=True)
        elif key not in TOP_LEVEL:
            report.add((key,), "unknown key", nearest(key, TOP_LEVEL), key=True)
        elif key in SWEEPABLE and not _resets(key, node):
            check((key,), node, (key,), report)
    _check_name(document, path, report)


def _check_name(document: Node, path: Path, report: Report) -> None:
    """The name becomes a folder. Without one, the file's counts."""
    name = document.child("name")
    if (name is None or name.value is None) and len(path.stem) > _LONGEST_NAME:
        report.add(
            (), f"the file's name has {len(path.stem)} characters", f"write `name:` with at most {_LONGEST_NAME}"
        )
    if name is not None and name.value is not None:
        value = check_value(name.plain(), FIELD_TYPES["name"], ("name",), report)
        if isinstance(value, str) and not _NAME.fullmatch(value):
            report.add(("name",), f"{shown(value)} is not a name", "letters, digits, space, dot, dash, underscore")
        elif isinstance(value, str) and len(value) > _LONGEST_NAME:
            report.add(("name",), f"has {len(value)} characters", f"at most {_LONGEST_NAME}")


def _resets(key: str, node: Node) -> bool:
    """`key:` with nothing behind it takes back what an extended file says."""
    return node.value is None and key not in _REQUIRED


def _expand(document: Node, path: Path, report: Report) -> Sweep:
    base = {key: node.plain() for key, node in document.value.items() if key in SWEEPABLE and node.value is not None}
    max_cells = msgspec.convert(base.get("limits", {}), Limits).max_cells
    reader = SweepReader(report)
    sweep, baseline = _section(document, "sweep"), _section(document, "baseline")
    points = reader.points(sweep, max_cells) if sweep is not None else [{}]
    excludes = reader.excludes(sweep) if sweep is not None else []
    marker = reader.pattern(baseline, ("baseline",)) if baseline is not None else None
    _refuse_missing(base, points, report)
    report.raise_any()
    points, rows = _rows(base, points, excludes, report)
    if len(rows) > max_cells:
        report.add(("sweep",), too_many(len(rows), max_cells), RAISE_LIMIT)
    report.raise_any()
    name = _section(document, "name")
    settings = Settings(
        name=str(name.value) if name is not None else path.stem,
        base=path.parent,
        baseline={key: collapse(value) for key, value in baseline.plain().items()} if baseline is not None else {},
    )
    marked = frozenset(pick(rows, marker, report)) if marker is not None else frozenset()
    report.raise_any()
    cells, origins = build_cells(rows, points, marked, settings)
    return Sweep(cells, document, origins)


def _section(document: Node, key: str) -> Node | None:
    node = document.child(key)
    return node if node is not None and node.value is not None else None


def _refuse_missing(base: Row, points: Sequence[Point], report: Report) -> None:
    for key, inner in _REQUIRED.items():
        written = inner in (base.get(key) or {})
        swept = bool(points) and all((key,) in point or (key, inner) in point for point in points)
        if not written and not swept and not report.errors:
            report.add((), f"{key!r} is missing", f"every experiment needs {' and '.join(_REQUIRED)}")


def _rows(
    base: Row, points: Sequence[Point], excludes: Sequence[Pattern], report: Report
) -> tuple[list[Point], list[Row]]:
    """The experiments in YAML shape, without those that an `exclude` names."""
    rows = [completed(assign(base, point)) for point in points]
    dropped = {index for pattern in excludes for index in pick(rows, pattern, report)}
    kept = [index for index in range(len(rows)) if index not in dropped]
    if not kept and not report.errors:
        report.add(("sweep",), f"the sweep expands to nothing: {len(rows)} cells, {len(dropped)} excluded")
    return [points[index] for index in kept], [rows[index] for index in kept]
