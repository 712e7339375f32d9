"""A small checker for the JSON Schema keywords that the experiment schema uses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_ANNOTATIONS = {"title", "description", "default", "$schema", "$defs"}
_KNOWN = {
    "type", "enum", "const", "properties", "patternProperties", "additionalProperties", "items", "anyOf", "oneOf",
    "$ref", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "minItems",
    "minLength", "discriminator",
}  # fmt: skip


def violations(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: str = "$") -> list[str]:
    """What is wrong; raises `KeyError` for a keyword that this checker does not know."""
    for key in schema:
        if key not in _KNOWN and key not in _ANNOTATIONS:
            raise KeyError(f"{path}: keyword {key!r}")
    if "$ref" in schema:
        return violations(value, _follow(schema["$ref"], root), root, path)
    return [
        *_simple(value, schema, path),
        *_alternatives(value, schema, root, path),
        *_inner(value, schema, root, path),
    ]


def _follow(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    target: Any = root
    for step in reference.removeprefix("#/").split("/"):
        target = target[step]
    return target  # type: ignore[no-any-return]


def _simple(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{path}: {value!r} is no {kinds}"
        return
    if "enum" in schema and not any(value == each and type(value) is type(each) for each in schema["enum"]):
        yield f"{path}: {value!r} is not in {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{path}: {value!r} is not {schema['const']!r}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{path}: {value!r} does not match"
    if _is(value, "number"):
        below = value < schema.get("minimum", value) or value <= schema.get("exclusiveMinimum", value - 1)
        above = value > schema.get("maximum", value) or value >= schema.get("exclusiveMaximum", value + 1)
        if below or above:
            yield f"{path}: {value!r} is out of range"
    if isinstance(value, list | str) and len(value) < schema.get("minItems", schema.get("minLength", 0)):
        yield f"{path}: too short"


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _alternatives(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> Iterator[str]:
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            hits = sum(not violations(value, each, root, path) for each in schema[keyword])
            if hits == 0 or (keyword == "oneOf" and hits > 1):
                yield f"{path}: {value!r} matches {hits} alternatives"


def _inner(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> Iterator[str]:
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from violations(item, schema["items"], root, f"{path}[{index}]")
    if not isinstance(value, dict):
        return
    yield from (f"{path}: {name!r} is missing" for name in schema.get("required", []) if name not in value)
    for key, item in value.items():
        found = [schema["properties"][key]] if key in schema.get("properties", {}) else []
        found += [inner for pattern, inner in schema.get("patternProperties", {}).items() if re.search(pattern, key)]
        rest = schema.get("additionalProperties", True)
        if not found and rest is False:
            yield f"{path}: unknown key {key!r}"
        for inner in found or ([rest] if isinstance(rest, dict) else []):
            yield from violations(item, inner, root, f"{path}.{key}")
