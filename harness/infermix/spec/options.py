"""Options of a component as data for listings: name, type, unit, range, default, description."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from msgspec import inspect

_PLAIN: dict[type[inspect.Type], str] = {
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BoolType: "bool",
    inspect.NoneType: "null",
    inspect.AnyType: "any",
}


@dataclass(frozen=True)
class Option:
    """One option. `range` is such as `1 <= x <= 4096`; `default` is plain data."""

    name: str
    type: str
    required: bool
    default: Any
    unit: str
    range: str
    description: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_options(kind: type[msgspec.Struct]) -> list[Option]:
    """The options of a struct in the order of their declaration."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return [_option(field) for field in info.fields]


def _option(field: inspect.Field) -> Option:
    default = field.default
    if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return Option(
        name=field.encode_name,
        type=_type(field.type),
        required=field.required,
        default=None if field.required else msgspec.json.decode(msgspec.json.encode(default)),
        unit=_metadata(field.type, "unit"),
        range=_range(field.type),
        description=_metadata(field.type, "description"),
    )


def _metadata(info: Any, key: str) -> str:
    """Unit or description, from the outside in; alternatives are searched in order."""
    if isinstance(info, inspect.Metadata):
        found = (info.extra or {}).get(key) or (info.extra_json_schema or {}).get(key)
        return str(found) if found else _metadata(info.type, key)
    if isinstance(info, inspect.UnionType):
        return next((text for each in info.types if (text := _metadata(each, key))), "")
    return ""


def _type(info: Any) -> str:
    if isinstance(info, inspect.Metadata):
        return _type(info.type)
    if isinstance(info, inspect.UnionType):
        return " | ".join(_type(each) for each in info.types)
    if isinstance(info, inspect.LiteralType):
        return " | ".join(str(value) for value in info.values)
    if isinstance(info, inspect.EnumType):
        return " | ".join(str(member.value) for member in info.cls)
    if isinstance(info, inspect.VarTupleType | inspect.ListType):
        return f"list of {_type(info.item_type)}"
    if isinstance(info, inspect.DictType):
        return f"mapping of {_type(info.value_type)}"
    if isinstance(info, inspect.StructType):
        return _struct(info)
    return _PLAIN.get(type(info), type(info).__name__.removesuffix("Type").lower())


def _struct(info: inspect.StructType) -> str:
    tag = [f"{info.tag_field}: {info.tag}"] if info.tag_field else []
    names = [field.encode_name + ("" if field.required else "?") for field in info.fields]
    return "{" + ", ".join([*tag, *names]) + "}"


def _range(info: Any) -> str:
    if isinstance(info, inspect.Metadata):
        return _range(info.type)
    if isinstance(info, inspect.UnionType):
        return next((text for each in info.types if (text := _range(each))), "")
    if not isinstance(info, inspect.IntType | inspect.FloatType):
        return ""
    low = _bound(info.ge, "{} <= x") or _bound(info.gt, "{} < x")
    high = _bound(info.le, "x <= {}") or _bound(info.lt, "x < {}")
    return f"{low}{high.removeprefix('x')}" if low and high else low or high


def _bound(value: float | None, text: str) -> str:
    return "" if value is None else text.format(f"{value:g}")
