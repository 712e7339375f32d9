"""Sweeps: a grid over dotted paths, paths varied together (`zip`), extra points (`include`) and `exclude`.

```yaml
sweep:
  parts.attention: [eager, sdpa]              # the grid: every combination
  parts.kv: [dense, {use: paged, block_size: 32}]
  zip: {seed: [1, 2], measure.repeats: [3, 5]}  # varied together; a list of such mappings makes several groups
  include: [{engine: transformers}]           # one extra cell each, over the rest of the file
  exclude: [{parts.attention: eager, parts.kv: dense}]
```

A swept value replaces what the file says at that path.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infermix.errors import nearest
from infermix.spec.fields import DEFAULTS, check, normalise, split_path
from infermix.spec.naming import collapse
from infermix.spec.validate import Report, shown
from infermix.spec.yaml_marks import KeyPath, Node, dotted

#: Keys of `sweep` that are not paths.
CLAUSES = ("zip", "include", "exclude")
#: A grid may be this many times larger than `max_cells` before its `exclude` is applied.
_SLACK = 20

#: One point of a sweep: path -> (plain value, where in the file it is written).
Point = dict[tuple[str, ...], "Assigned"]


@dataclass(frozen=True, slots=True)
class Assigned:
    """A swept value in its resolved form, and its place in the file."""

    value: Any
    node: Node


@dataclass(frozen=True)
class Pattern:
    """A partial assignment that picks cells (`exclude`, `baseline`)."""

    wanted: dict[tuple[str, ...], Any]
    at: KeyPath

    def text(self) -> str:
        return ", ".join(f"{'.'.join(path)}: {shown(collapse(v))}" for path, v in self.wanted.items())


class SweepReader:
    """Reads the `sweep` section once and validates every value where it is written."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def points(self, section: Node, max_cells: int) -> list[Point]:
        """Every point, in the order of the file, without the excluded ones (those are left to `Pattern`s)."""
        if not isinstance(section.value, dict):
            self._report.add(("sweep",), f"expected a mapping of paths to lists, got {shown(section.plain())}")
            return []
        axes = [
            [{path: value} for value in values]
            for key, node in section.value.items()
            if key not in CLAUSES
            for path, values in self._axis(key, node, ("sweep", key))
        ]
        groups = self._zips(section.value.get("zip"))
        self._refuse_repeats([*axes, *groups])
        axes += groups
        extra = self._includes(section.value.get("include"))
        if self._report.errors:
            return []
        self._refuse_size(axes, len(extra), max_cells)
        grid = [_joined(combination) for combination in itertools.product(*axes)] if axes else []
        return [*grid, *extra]

    def excludes(self, section: Node) -> list[Pattern]:
        return [
            pattern
            for at, item in self._items(section.child("exclude"), "exclude")
            if (pattern := self.pattern(item, at)) is not None
        ]

    def pattern(self, node: Node, at: KeyPath) -> Pattern | None:
        """A mapping of dotted paths to values."""
        point = self._point(node, at)
        return Pattern({path: assigned.value for path, assigned in point.items()}, at) if point else None

    def _refuse_repeats(self, axes: Sequence[Sequence[Point]]) -> None:
        """A path in the grid and in `zip`, or in two of its groups, would be decided by one of them alone."""
        counts = Counter(path for axis in axes for path in axis[0])
        for path, count in counts.items():
            if count > 1:
                self._report.add(("sweep", "zip"), f"{dotted(path)} is varied twice")

    def _refuse_size(self, axes: Sequence[Sequence[Point]], extra: int, max_cells: int) -> None:
        count = extra
        if axes:
            product = 1
            for axis in axes:
                product *= len(axis)
            count += product
        if count > max_cells * _SLACK:
            self._report.add(("sweep",), too_many(count, max_cells), RAISE_LIMIT)
            self._report.raise_any()

    def _axis(self, key: str, node: Node, at: KeyPath) -> Iterator[tuple[tuple[str, ...], list[Assigned]]]:
        path = split_path(key, at, self._report)
        if path is None:
            if key in ("ziped", "zipped", "includes", "excludes"):
                self._report.errors[-1].hint = nearest(key, CLAUSES)
            return
        if not isinstance(node.value, list):
            self._report.add(at, f"expected a list of values, got {shown(node.plain())}", "write [a, b]")
        elif not node.value:
            self._report.add(at, "is an empty list, so the sweep expands to nothing")
        else:
            yield path, self._values(path, node.value, at)

    def _values(self, path: tuple[str, ...], nodes: Sequence[Node], at: KeyPath) -> list[Assigned]:
        values: list[Assigned] = []
        for index, item in enumerate(nodes):
            assigned = self._assigned(path, item, (*at, index))
            if any(assigned.value == other.value and type(assigned.value) is type(other.value) for other in values):
                self._report.add((*at, index), f"{shown(collapse(assigned.value))} is listed twice")
            values.append(assigned)
        return values

    def _assigned(self, path: tuple[str, ...], node: Node, at: KeyPath) -> Assigned:
        node = normalise(path, node)
        check(path, node, at, self._report)
        return Assigned(node.plain(), node)

    def _zips(self, node: Node | None) -> list[list[Point]]:
        groups: list[tuple[KeyPath, Node]] = []
        if node is not None and isinstance(node.value, list):
            groups = [(("sweep", "zip", i), item) for i, item in enumerate(node.value)]
        elif node is not None and node.value is not None:
            groups = [(("sweep", "zip"), node)]
        return [group for at, item in groups if (group := self._zip(item, at))]

    def _zip(self, node: Node, at: KeyPath) -> list[Point]:
        if not isinstance(node.value, dict) or not node.value:
            self._report.add(at, f"expected a mapping of paths to lists, got {shown(node.plain())}")
            return []
        columns = dict(pair for key, item in node.value.items() for pair in self._axis_of_zip(key, item, (*at, key)))
        lengths = {dotted(path): len(values) for path, values in columns.items()}
        if len(set(lengths.values())) > 1:
            listing = ", ".join(f"{path} has {count}" for path, count in lengths.items())
            self._report.add(at, f"the lists differ in length: {listing}")
            return []
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _axis_of_zip(self, key: str, node: Node, at: KeyPath) -> Iterator[tuple[tuple[str, ...], list[Assigned]]]:
        """Like an axis, but equal values may repeat: the rows differ, not the columns."""
        path = split_path(key, at, self._report)
        if path is None:
            return
        if not isinstance(node.value, list) or not node.value:
            self._report.add(at, f"expected a list of values, got {shown(node.plain())}")
            return
        yield path, [self._assigned(path, item, (*at, index)) for index, item in enumerate(node.value)]

    def _includes(self, node: Node | None) -> list[Point]:
        return [point for at, item in self._items(node, "include") if (point := self._point(item, at))]

    def _items(self, node: Node | None, clause: str) -> list[tuple[KeyPath, Node]]:
        if node is None or node.value is None:
            return []
        if not isinstance(node.value, list):
            self._report.add(("sweep", clause), f"expected a list of mappings, got {shown(node.plain())}")
            return []
        return [(("sweep", clause, index), item) for index, item in enumerate(node.value)]

    def _point(self, node: Node, at: KeyPath) -> Point:
        if not isinstance(node.value, dict) or not node.value:
            self._report.add(at, f"expected a mapping of paths to values, got {shown(node.plain())}")
            return {}
        point: Point = {}
        for key, item in node.value.items():
            path = split_path(key, (*at, key), self._report)
            if path is not None:
                point[path] = self._assigned(path, item, (*at, key))
        return point


RAISE_LIMIT = "narrow it, or raise limits.max_cells"


def too_many(count: int, max_cells: int) -> str:
    return f"the sweep expands to {count} cells, more than limits.max_cells ({max_cells})"


def _joined(combination: Sequence[Point]) -> Point:
    point: Point = {}
    for part in combination:
        point.update(part)
    return point


def assign(base: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """The experiment in YAML shape with a point laid over it; `base` is not changed. Longer paths go last."""
    result = dict(base)
    fresh: set[tuple[str, ...]] = set()
    for path in sorted(point, key=len):
        target = result
        for depth, step in enumerate(path[:-1]):
            if path[: depth + 1] not in fresh:
                below = target.get(step)
                target[step] = dict(below) if isinstance(below, dict) else {}
                fresh.add(path[: depth + 1])
            target = target[step]
        target[path[-1]] = point[path].value
    return result


def pick(rows: Sequence[Mapping[str, Any]], pattern: Pattern, report: Report) -> list[int]:
    """Indices of the experiments that a pattern matches; a fault that says what is there when none does.

    A name alone (`paged`) means exactly that where it occurs, otherwise that component with any options.
    """
    hits = set(range(len(rows)))
    for path, wanted in pattern.wanted.items():
        values = [value_at(row, path) for row in rows]
        exact = {index for index, value in enumerate(values) if value == wanted}
        found = exact or {index for index, value in enumerate(values) if _covers(wanted, value)}
        if not found:
            names = sorted({str(collapse(value)) for value in values if value is not None})
            there = f"the cells have: {', '.join(names[:12])}" if names else "no cell sets it"
            report.add((*pattern.at, ".".join(path)), f"no cell has {shown(collapse(wanted))} here", there)
            return []
        hits &= found
    if not hits:
        report.add(pattern.at, f"no cell has all of {pattern.text()}")
    return sorted(hits)


def value_at(row: Mapping[str, Any], path: Sequence[str]) -> Any:
    """The value of a path in a resolved experiment, defaults included.

    Default parts count only beside the default engine, since other engines need not host them.
    """
    found = _lookup(row, path)
    other_engine = _lookup(row, ("engine", "use")) not in (None, DEFAULTS["engine"]["use"])
    if found is not None or (path[0] == "parts" and other_engine):
        return found
    return _lookup(DEFAULTS, path)


def _lookup(row: Any, path: Sequence[str]) -> Any:
    for step in path:
        if not isinstance(row, Mapping) or step not in row:
            return None
        row = row[step]
    return row


def _covers(wanted: Any, value: Any) -> bool:
    """Whether a mapping has everything of a partial one."""
    if isinstance(wanted, dict) and isinstance(value, dict):
        return all(key in value and _covers(item, value[key]) for key, item in wanted.items())
    return bool(wanted == value)
