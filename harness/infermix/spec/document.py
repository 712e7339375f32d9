"""One tree out of an experiment file, the files that it extends, and `--set`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infermix.errors import UserError, UserErrors, nearest
from infermix.spec.fields import normalise
from infermix.spec.merge import merge
from infermix.spec.validate import shown
from infermix.spec.yaml_marks import Node, Place, parse_yaml


def read_document(path: Path, sets: Sequence[str]) -> Node:
    """The merged tree with short forms expanded, not validated. Raises `UserError`."""
    return _apply_sets(_read(path, ()), sets)


def _read(path: Path, chain: tuple[Path, ...]) -> Node:
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(each.name for each in (*chain, resolved))
        raise UserError(f"files extend each other in a circle: {names}", where=str(path), key="extends")
    document = _normalised(parse_yaml(_text(path), str(path)), path)
    parent = document.value.pop("extends", None)
    if parent is None or parent.value is None:
        return document
    return merge(_read(_parent_path(path, parent), (*chain, resolved)), document)


def _parent_path(path: Path, parent: Node) -> Path:
    if not isinstance(parent.value, str) or not parent.value:
        message = f"expected a file name, got {shown(parent.plain())}"
        raise UserError(message, where=str(parent.place), key="extends")
    below = path.parent / parent.value
    if not below.is_file():
        raise UserError(f"{parent.value!r} does not exist", where=str(parent.place), key="extends")
    return below


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        others = [each.name for each in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        raise UserError("no such file", where=str(path), hint=nearest(path.name, others)) from None
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 text (byte {error.start})", where=str(path)) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None


def _normalised(document: Node, path: Path) -> Node:
    if not isinstance(document.value, dict):
        message = f"expected a mapping with keys such as `model`, got {shown(document.plain())}"
        raise UserError(message, where=str(path))
    values = {key: normalise((key,), child) for key, child in document.value.items()}
    return Node(values, document.place, document.keys)


def _apply_sets(document: Node, sets: Sequence[str]) -> Node:
    errors: list[UserError] = []
    for text in sets:
        key, equals, value = text.partition("=")
        try:
            if not equals:
                raise UserError("has no `=`", hint="write --set parts.kv=dense")
            steps = _steps(key.strip())
            _refuse_swept(document, steps)
            document = merge(document, _set_tree(steps, value))
        except UserError as error:
            errors.append(UserError(error.message, where="--set", key=key.strip(), hint=error.hint))
    if errors:
        raise UserErrors(errors)
    return document


def _steps(text: str) -> tuple[str, ...]:
    """`sweep.parts.kv` -> `("sweep", "parts.kv")`, any other path step by step."""
    head, _, rest = text.partition(".")
    if "[" in text or any(step.isdigit() for step in text.split(".")):
        raise UserError("single items of a list cannot be set", hint="set the whole list")
    if "" in text.split(".") or head == "extends":
        raise UserError("cannot be set", hint="write --set parts.kv=dense")
    if head == "sweep" and rest.startswith("zip."):
        return (head, "zip", rest.removeprefix("zip."))
    return (head, rest) if head in ("sweep", "baseline") and rest else tuple(text.split("."))


def _set_tree(steps: tuple[str, ...], value: str) -> Node:
    """`("parts", "kv"), "dense"` -> the tree `{parts: {kv: {use: dense}}}`."""
    place = Place("--set")
    node = _at(place, parse_yaml(value, "--set")) if value.strip() else Node(None, place)
    for depth in range(len(steps), 0, -1):
        node = Node({steps[depth - 1]: normalise(steps[:depth], node)}, place, {steps[depth - 1]: place})
    return node


def _at(place: Place, node: Node) -> Node:
    """The same tree, all of it written at `place`."""
    value: Any = node.value
    if isinstance(value, dict):
        value = {key: _at(place, child) for key, child in value.items()}
    elif isinstance(value, list):
        value = [_at(place, child) for child in value]
    return Node(value, place, dict.fromkeys(node.keys, place))


def _refuse_swept(document: Node, steps: tuple[str, ...]) -> None:
    """A value that every grid cell overrides would be dropped without a word."""
    sweep = document.child("sweep")
    axes = list(sweep.value) if sweep is not None and isinstance(sweep.value, dict) else []
    for axis in [*axes, *_zipped(sweep)]:
        path = tuple(axis.split("."))
        if steps[: len(path)] == path:
            where = "sweep" if axis in axes else "sweep.zip"
            raise UserError(f"{axis} is swept, so this would have no effect", hint=f"set {where}.{axis}=[...]")


def _zipped(sweep: Node | None) -> list[str]:
    """Paths that are varied together; several groups of them are a list, of which no item can be set."""
    found = sweep.child("zip") if sweep is not None else None
    groups = found.value if found is not None and isinstance(found.value, list) else [found]
    return [path for group in groups if group is not None and isinstance(group.value, dict) for path in group.value]
