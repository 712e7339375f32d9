"""Strict validation of plain data against msgspec structs: every fault at once, each at its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, get_args

import msgspec
from msgspec import inspect

from infermix.errors import UserError, UserErrors, nearest
from infermix.spec.yaml_marks import KeyPath, dotted

T = TypeVar("T")

#: Says where the value (or with `key=True` the key) at a path was written; `None` when nobody knows.
Locate = Callable[..., "str | None"]

_INNER = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
#: How msgspec's own messages begin; others come from an option set's `__post_init__` and say everything.
_BUILT_IN = re.compile(r"expected |invalid ")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def nowhere(path: KeyPath, *, key: bool = False) -> str | None:
    """The `Locate` of data that was not written in a file."""
    return None


class Report:
    """Collects the faults of one input."""

    def __init__(self, locate: Locate = nowhere) -> None:
        self.errors: list[UserError] = []
        self.locate = locate

    def add(self, path: KeyPath, message: str, hint: str | None = None, *, key: bool = False) -> None:
        where = self.locate(path, key=key)
        self.errors.append(UserError(message, where=where, key=dotted(path) or None, hint=hint))

    def raise_any(self) -> None:
        """Raises `UserErrors` when there is at least one fault; each distinct one appears once."""
        unique = {str(error): error for error in self.errors}
        if unique:
            raise UserErrors(unique.values())


def check_struct(data: Any, kind: type[T], path: KeyPath, report: Report) -> T | None:
    """Convert a mapping to `kind`; `None` and entries in `report` when something is wrong."""
    if not isinstance(data, Mapping):
        report.add(path, f"expected a mapping, got {shown(data)}")
        return None
    before = len(report.errors)
    fields = {field.encode_name: field for field in msgspec.structs.fields(cast("Any", kind))}
    for key in data:
        if key not in fields:
            report.add((*path, key), "unknown key", nearest(str(key), fields), key=True)
    for name, field in fields.items():
        if name in data:
            check_value(data[name], field.type, (*path, name), report)
        elif field.required:
            report.add(path, f"{name!r} is missing")
    if len(report.errors) > before:
        return None
    return _convert(data, kind, path, report)


def check_value(value: Any, kind: Any, path: KeyPath, report: Report) -> Any:
    """Convert any value to a type annotation; nested structs report every fault."""
    struct = _struct_for(value, kind)
    entries = inspect.type_info(kind)
    if struct is None and isinstance(entries, inspect.DictType) and isinstance(value, Mapping):
        return _check_dict(value, get_args(kind), path, report)
    if struct is None:
        return _convert(value, kind, path, report)
    config, tag_field = struct.__struct_config__, struct.__struct_config__.tag_field
    if tag_field is not None and config.tag is not None:
        value = {key: item for key, item in value.items() if key != tag_field}
    return check_struct(value, struct, path, report)


def _check_dict(value: Mapping[Any, Any], kinds: tuple[Any, ...], path: KeyPath, report: Report) -> Any:
    key_kind, item_kind = kinds or (Any, Any)
    return {
        _convert(key, key_kind, (*path, key), report): check_value(item, item_kind, (*path, key), report)
        for key, item in value.items()
    }


def shown(value: Any) -> str:
    """A value as it appears in a message, shortened."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _struct_for(value: Any, kind: Any) -> Any:
    """The struct class that a mapping is meant for: the only one, or the one that its tag names."""
    if not isinstance(value, Mapping):
        return None
    for info in _alternatives(inspect.type_info(kind)):
        if isinstance(info, inspect.StructType) and (info.tag_field is None or value.get(info.tag_field) == info.tag):
            return info.cls
    return None


def _alternatives(info: Any) -> tuple[Any, ...]:
    if isinstance(info, inspect.Metadata):
        return _alternatives(info.type)
    if isinstance(info, inspect.UnionType):
        return tuple(each for part in info.types for each in _alternatives(part))
    return (info,)


def _convert(value: Any, kind: Any, path: KeyPath, report: Report) -> Any:
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        message, inner = _split(str(error))
        at = (*path, *inner)
        offender = _lookup(value, inner)
        got = f", got {shown(offender)}" if _BUILT_IN.match(message) else ""
        report.add(at, message + got, _choices(kind, offender, inner))
    except UserError as error:  # raised by an option set's own `__post_init__`
        report.add(path, error.message, error.hint)
    return None


def _split(text: str) -> tuple[str, KeyPath]:
    found = _INNER.search(text)
    steps = _STEP.findall(found["path"]) if found else []
    inner = tuple(int(index) if index else name for name, index in steps)
    message = text[: found.start()] if found else text
    message = re.sub(r", got `[^`]*`$", "", message)
    message = re.sub(r"^Invalid (enum )?value .*", "Expected one of the known values", message)
    return message[:1].lower() + message[1:].replace("`", ""), inner


def _lookup(value: Any, path: KeyPath) -> Any:
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            break
    return value


def _choices(kind: Any, value: Any, inner: KeyPath) -> str | None:
    """The nearest of a fixed set of values, or of the tags of a union."""
    infos = _alternatives(inspect.type_info(kind))
    tags = sorted(str(info.tag) for info in infos if isinstance(info, inspect.StructType) and info.tag_field)
    if len(tags) == 1 and isinstance(value, dict):  # it is of that kind; something else is wrong with it
        return None
    if tags and not inner and isinstance(value, str | dict):
        return f"write {{use: {value if value in tags else tags[0]}, ...}}; known: {', '.join(tags)}"
    names: set[str] = set()
    for info in infos:
        if isinstance(info, inspect.StructType):
            names.update({str(info.tag)} if inner == (info.tag_field,) else ())
        elif isinstance(info, inspect.LiteralType) and not inner:
            names.update(str(each) for each in info.values)
        elif isinstance(info, inspect.EnumType) and not inner:
            names.update(str(each.value) for each in info.cls)
    return nearest(str(value), names)
