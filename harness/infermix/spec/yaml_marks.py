"""YAML with places: every value knows its file, line and column.

Scalars follow the YAML 1.2 core schema (`no` is a string, `1e-3` a float, `010` ten). Keys are strings and unique.
Anchors and aliases work; merge keys, tags, several documents and endless aliases are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode, SequenceNode

from infermix.errors import UserError, UserErrors

_TAG = "tag:yaml.org,2002:"
_MAX_NODES = 100_000
_MAX_DEPTH = 60

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """`("quality", 0, "use")` -> `quality[0].use`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was written; line and column count from 1 and are 0 when there is none (`--set`)."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(slots=True)
class Node:
    """One YAML value. `value` is a dict of nodes, a list of nodes, or a scalar; `keys` are the places of the keys."""

    value: Any
    place: Place
    keys: dict[str, Place] = field(default_factory=dict)

    def plain(self) -> Any:
        """The value without places; a fresh copy."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def at(self, path: KeyPath) -> Node | None:
        """The node at `path`, or `None`."""
        node: Node | None = self
        for step in path:
            node = node.child(step) if node is not None else None
        return node

    def child(self, step: str | int) -> Node | None:
        if isinstance(self.value, dict):
            return self.value.get(step)
        if isinstance(self.value, list) and isinstance(step, int) and step < len(self.value):
            return self.value[step]
        return None

    def locate(self, path: KeyPath, *, key: bool = False) -> Place:
        """Place of the value (or of the key) at `path`, or of the nearest enclosing value that was written."""
        node = self
        for depth, step in enumerate(path):
            if key and depth == len(path) - 1 and step in node.keys:
                return node.keys[str(step)]
            child = node.child(step)
            if child is None:
                break
            node = child
        return node.place


class _Loader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):  # type: ignore[misc]
    """SafeLoader whose plain scalars are resolved by the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}


def _resolve(kind: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(_TAG + kind, re.compile(rf"^(?:{pattern})$"), list(first))


_resolve("bool", "true|True|TRUE|false|False|FALSE", "tTfF")
_resolve("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789")
_resolve("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789")
_resolve("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+.")
_Loader.add_implicit_resolver(_TAG + "null", re.compile(r"^(?:null|Null|NULL|~|)$"), ["n", "N", "~", ""])


def parse_yaml(text: str, file: str) -> Node:
    """Parse one document. Raises `UserError` (`UserErrors` for what the parser gets past) with places."""
    loader = None
    try:
        loader = _Loader(text)
        tree = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, file) from None
    except RecursionError:
        raise UserError("nests too deeply", where=file, hint=f"at most {_MAX_DEPTH} levels") from None
    except yaml.reader.ReaderError as error:
        raise UserError(f"not readable as YAML: {error.reason}", where=file) from None
    finally:
        if loader is not None:
            loader.dispose()
    if tree is None:
        raise UserError("is empty", where=file)
    builder = _Builder(file)
    node = builder.build(tree, ())
    if builder.errors:
        raise UserErrors(builder.errors)
    return node


def _syntax_error(error: yaml.MarkedYAMLError, text: str, file: str) -> UserError:
    mark = error.problem_mark or error.context_mark
    place = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file)
    problem = error.problem or "syntax error"
    if "single document" in str(error):
        return UserError("holds several documents", where=str(place), hint="one experiment per file")
    if mark and _indented_by_tab(text, mark):
        return UserError("not valid YAML: a tab indents this line", where=str(place), hint="indent with spaces")
    return UserError(f"not valid YAML: {problem}", where=str(place))


def _indented_by_tab(text: str, mark: yaml.Mark) -> bool:
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    indentation = line[: len(line) - len(line.lstrip())]
    return mark.column < len(indentation) and "\t" in indentation


class _Builder:
    """Makes `Node`s of composed YAML nodes and collects every fault."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.errors: list[UserError] = []
        self.count = 0

    def build(self, node: Any, path: KeyPath) -> Node:
        place = self._place(node)
        self.count += 1
        if self.count > _MAX_NODES or len(path) > _MAX_DEPTH:
            raise UserError(
                f"is too large: over {_MAX_NODES} values or {_MAX_DEPTH} levels, aliases included", where=self.file
            )
        if isinstance(node, MappingNode):
            return self._mapping(node, place, path)
        if isinstance(node, SequenceNode):
            self._check_tag(node, "seq", place, path)
            return Node([self.build(item, (*path, i)) for i, item in enumerate(node.value)], place)
        return Node(self._scalar(node, place, path), place)

    def _mapping(self, node: MappingNode, place: Place, path: KeyPath) -> Node:
        self._check_tag(node, "map", place, path)
        children: dict[str, Node] = {}
        keys: dict[str, Place] = {}
        for key, key_place, value in self._pairs(node, path):
            if key in children:
                self._fault(key_place, (*path, key), f"appears twice; first at line {keys[key].line}")
                continue
            keys[key] = key_place
            children[key] = self.build(value, (*path, key))
        return Node(children, place, keys)

    def _pairs(self, node: MappingNode, path: KeyPath) -> Iterator[tuple[str, Place, Any]]:
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, ScalarNode) or key_node.tag != _TAG + "str":
                shown = getattr(key_node, "value", None)
                self._fault(place, path, f"keys must be text, not {shown!r}", "quote it")
            elif key_node.value == "<<":
                self._fault(place, (*path, "<<"), "merge keys are not supported", "use `extends` or an alias")
            else:
                yield key_node.value, place, value_node

    def _scalar(self, node: ScalarNode, place: Place, path: KeyPath) -> Any:
        kind, text = node.tag.removeprefix(_TAG), node.value
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            return self._integer(text, place, path)
        if kind == "float":
            return self._float(text, place, path)
        self._fault(place, path, f"tag {node.tag!r} is not supported", "write a plain value")
        return None

    def _integer(self, text: str, place: Place, path: KeyPath) -> int:
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        try:
            value = int(text[2:] if base != 10 else text, base)
        except ValueError:  # explicit `!!int abc`, or thousands of digits
            value = 2**63
        if not -(2**63) <= value < 2**63:
            self._fault(place, path, f"{text[:40]!r} is not a 64-bit integer")
            return 0
        return value

    def _float(self, text: str, place: Place, path: KeyPath) -> float:
        try:
            value = float(text)
        except ValueError:  # `.inf`, `.nan`, explicit `!!float abc`
            value = math.nan
        if not math.isfinite(value):
            self._fault(place, path, f"{text[:40]!r} is not a finite number")
            return 0.0
        return value

    def _check_tag(self, node: Any, kind: str, place: Place, path: KeyPath) -> None:
        if node.tag != _TAG + kind:
            self._fault(place, path, f"tag {node.tag!r} is not supported")

    def _fault(self, place: Place, path: KeyPath, message: str, hint: str | None = None) -> None:
        self.errors.append(UserError(message, where=str(place), key=dotted(path) or None, hint=hint))

    def _place(self, node: Any) -> Place:
        return Place(self.file, node.start_mark.line + 1, node.start_mark.column + 1)
