"""What an experiment file may contain, by dotted path: which paths exist, their short forms, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from infermix.errors import nearest
from infermix.roles.component import PART_ROLES
from infermix.spec.experiment import DEFAULT_ENGINE, DEFAULT_PARTS, Experiment, Limits, Measure, ModelSource
from infermix.spec.validate import Report, check_struct, check_value, shown
from infermix.spec.yaml_marks import KeyPath, Node

STRUCTS: Mapping[str, type[msgspec.Struct]] = {"model": ModelSource, "measure": Measure, "limits": Limits}
SCALARS = ("device", "dtype", "seed")
ROLES = tuple(role.value for role in PART_ROLES)
#: Sections whose value a sweep may vary.
SWEEPABLE = ("model", "workload", "engine", "parts", "transforms", "measure", "limits", "quality", *SCALARS)
TOP_LEVEL = ("extends", "name", *SWEEPABLE, "sweep", "baseline")
#: Keys that later versions will use; refused by name so that nobody believes that they work.
RESERVED = ("adapters", "parallel")

FIELD_TYPES: Mapping[str, Any] = {
    field.name: field.type
    for kind in (Experiment,)
    for field in msgspec.structs.fields(kind)
    if field.name in (*SCALARS, "name")
}
_STRUCT_TYPES = {
    (section, field.name): field.type for section, kind in STRUCTS.items() for field in msgspec.structs.fields(kind)
}
_OPEN = {key for key, kind in _STRUCT_TYPES.items() if isinstance(inspect.type_info(kind), inspect.DictType)}

#: The resolved form of everything that a file may leave out, in YAML shape.
DEFAULTS: Mapping[str, Any] = {
    "device": "auto",
    "dtype": "auto",
    "seed": 0,
    "quality": [],
    "transforms": [],
    "engine": {"use": DEFAULT_ENGINE},
    "parts": {role: {"use": name} for role, name in DEFAULT_PARTS.items()},
    "measure": msgspec.to_builtins(Measure()),
    "limits": msgspec.to_builtins(Limits()),
    "model": {"weights": "real"},
}


def is_use(path: KeyPath) -> bool:
    """Whether a component is written at `path`."""
    return path in (("workload",), ("engine",)) or (len(path) == 2 and path[0] == "parts" and path[1] in ROLES)


def split_path(text: str, at: KeyPath, report: Report) -> tuple[str, ...] | None:
    """`parts.kv.block_size` -> its steps; a fault at `at` and `None` when no experiment has such a path."""
    steps = tuple(text.split("."))
    known = _known_steps(steps)
    if known is None:
        return steps
    report.add(at, "no such path in an experiment", nearest(text, known) or None, key=True)
    return None


def _known_steps(steps: tuple[str, ...]) -> Iterable[str] | None:
    """`None` for a path that exists; otherwise the paths that would."""
    head = steps[0]
    if head not in SWEEPABLE or "" in steps:
        return [*SWEEPABLE, *(f"parts.{role}" for role in ROLES)]
    if len(steps) == 1 or head in ("workload", "engine"):
        return None
    if head == "parts":
        return None if steps[1] in ROLES else [f"parts.{role}" for role in ROLES]
    if head not in STRUCTS:
        return [head]
    if steps == ("limits", "max_cells") or (head, steps[1]) not in _STRUCT_TYPES:
        return [".".join(key) for key in _STRUCT_TYPES if key[0] == head and key[1] != "max_cells"]
    return None if len(steps) == 2 or steps[:2] in _OPEN else [".".join(steps[:2])]


def normalise(path: KeyPath, node: Node) -> Node:
    """Expand short forms (`paged` -> `{use: paged}`) wherever a component or a model is written."""
    if is_use(path):
        return _as_mapping(node, "use")
    if path == ("model",):
        return _as_mapping(node, "source")
    if path in (("quality",), ("transforms",)) and isinstance(node.value, list):
        return Node([_as_mapping(item, "use") for item in node.value], node.place)
    if path == ("parts",) and isinstance(node.value, dict):
        parts = {key: normalise(("parts", key), child) for key, child in node.value.items()}
        return Node(parts, node.place, node.keys)
    return node


def _as_mapping(node: Node, key: str) -> Node:
    return Node({key: node}, node.place) if isinstance(node.value, str) else node


def check(path: KeyPath, node: Node, at: KeyPath, report: Report) -> None:
    """Validate the normalised value of `path`, written at `at`. Options are left to `compose`."""
    value, head = node.plain(), path[0]
    if is_use(path):
        check_use(value, at, report, named=path != ("workload",))
    elif head == "quality":
        _check_list(value, "evaluators", at, report)
    elif head == "transforms":
        _check_transforms(value, at, report)
    elif path == ("parts",):
        _check_parts(node, at, report)
    elif head in STRUCTS:
        _check_struct_path(path, value, at, report)
    elif head in FIELD_TYPES:
        check_value(value, FIELD_TYPES[str(head)], at, report)


def _check_struct_path(path: KeyPath, value: Any, at: KeyPath, report: Report) -> None:
    head = str(path[0])
    if len(path) == 1:
        check_struct(value, STRUCTS[head], at, report)
    elif len(path) == 2:
        check_value(value, _STRUCT_TYPES[head, str(path[1])], at, report)
    elif head != "model":
        check_value({str(path[2]): value}, _STRUCT_TYPES[head, str(path[1])], at, report)


def check_use(value: Any, at: KeyPath, report: Report, *, named: bool = False) -> None:
    """A component: a mapping with `use`. `named`: the name may be left out, the default component is meant."""
    if not isinstance(value, dict):
        report.add(at, f"expected a name or a mapping with `use`, got {shown(value)}")
    elif "use" not in value and not named:
        report.add(at, "has no `use`", "write {use: NAME, ...}")
    elif not isinstance(value.get("use", ""), str):
        report.add((*at, "use"), f"expected a name, got {shown(value['use'])}")


def _check_parts(node: Node, at: KeyPath, report: Report) -> None:
    if not isinstance(node.value, dict):
        report.add(at, f"expected a mapping of roles, got {shown(node.plain())}", "known: " + ", ".join(ROLES))
        return
    for role, child in node.value.items():
        if role in ROLES:
            check_use(child.plain(), (*at, role), report, named=True)
        else:
            report.add((*at, role), "unknown role", nearest(role, ROLES), key=True)


def _check_transforms(value: Any, at: KeyPath, report: Report) -> None:
    _check_list(value, "transforms", at, report, hint="write [NAME, ...]")
    names = [item.get("use") for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    for index, name in enumerate(names):
        if name is not None and name in names[:index]:
            report.add((*at, index), f"{name!r} is listed twice", "a transform is applied once")


def _check_list(value: Any, what: str, at: KeyPath, report: Report, hint: str | None = None) -> None:
    if not isinstance(value, list):
        report.add(at, f"expected a list of {what}, got {shown(value)}", hint)
        return
    for index, item in enumerate(value):
        check_use(item, (*at, index), report)
