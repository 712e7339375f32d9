"""The JSON Schema (draft 2020-12) of experiment files, for editors.

It says what `spec.load` and `compose` check, as far as JSON Schema can; the options come from the components given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from infermix.roles.component import PART_ROLES, Component, Options, Role
from infermix.spec.experiment import Experiment, Limits, Measure, ModelSource
from infermix.spec.fields import ROLES, SCALARS, STRUCTS
from infermix.spec.options import describe_options

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REF = "#/$defs/{name}"

Schema = dict[str, Any]


def experiment_schema(components: Iterable[Component]) -> Schema:
    """Schema of a file that may use these components."""
    by_role = {role: sorted((c for c in _of_role(components, role)), key=_name) for role in Role}
    option_types = {c.options for group in by_role.values() for c in group}
    kinds: list[type[msgspec.Struct]] = [ModelSource, Measure, Limits, *sorted(option_types, key=_qualified)]
    refs, definitions = msgspec.json.schema_components(kinds, ref_template=_REF)
    inner = dict(zip(kinds, (ref["$ref"].rsplit("/", 1)[-1] for ref in refs), strict=True))
    for kind, name in inner.items():
        _add_units(definitions[name], kind)
    uses = {f"{role.value}_use": _use_schema(role, group, inner, definitions) for role, group in by_role.items()}
    shared = {name: body for name, body in definitions.items() if name not in {inner[kind] for kind in option_types}}
    properties = _properties()
    schema = {
        "$schema": DIALECT,
        "title": "InferMix experiment",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {**shared, **uses, "model": _model_schema(), **_sweep_definitions(properties)},
    }
    plain: Schema = msgspec.json.decode(msgspec.json.encode(schema))  # defaults may hold tuples
    return plain


def _of_role(components: Iterable[Component], role: Role) -> list[Component]:
    return [component for component in components if component.role is role]


def _name(component: Component) -> str:
    return component.name


def _qualified(kind: type[Options]) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _add_units(schema: Schema, kind: type[msgspec.Struct]) -> None:
    """Editors show descriptions only, so the unit goes in there."""
    schema["additionalProperties"] = False
    for option in describe_options(kind):
        body = schema["properties"][option.name]
        if option.unit:
            body["description"] = f"{option.description or option.name} [{option.unit}]"


def _use_schema(
    role: Role, components: Sequence[Component], inner: Mapping[Any, str], definitions: Mapping[str, Schema]
) -> Schema:
    """A name, or a mapping with `use` and the options of that component."""
    names: Schema = {"enum": [c.name for c in components if not _requires_options(c)]}
    mappings = [_component_schema(c, definitions[inner[c.options]]) for c in components]
    return {"description": f"{role.value}: a name, or `use` with options", "oneOf": [names, *mappings]}


def _requires_options(component: Component) -> bool:
    return any(option.required for option in describe_options(component.options))


def _component_schema(component: Component, options: Schema) -> Schema:
    use = {"const": component.name, "description": component.summary}
    return {
        "type": "object",
        "description": component.summary,
        "properties": {"use": use, **options.get("properties", {})},
        "required": ["use", *options.get("required", [])],
        "additionalProperties": False,
    }


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


def _model_schema() -> Schema:
    text = "package:NAME, shape:NAME, a Hugging Face id, a directory or a .gguf file"
    return {"oneOf": [{"type": "string", "description": text}, _ref("ModelSource")]}


def _properties() -> Schema:
    scalars, _ = msgspec.json.schema_components(
        [field.type for field in msgspec.structs.fields(Experiment) if field.name in SCALARS], ref_template=_REF
    )
    names = [field.name for field in msgspec.structs.fields(Experiment) if field.name in SCALARS]
    return {
        "extends": {"type": "string", "description": "another file that this one is laid over"},
        "name": {"type": "string", "description": "default: the file's name"},
        "model": _ref("model"),
        "workload": _ref("workload_use"),
        "engine": _ref("engine_use"),
        "parts": {
            "type": "object",
            "properties": {role.value: _ref(f"{role.value}_use") for role in PART_ROLES},
            "additionalProperties": False,
        },
        "transforms": {
            "type": "array",
            "items": _ref("transform_use"),
            "description": "changes of the loaded model, applied in this order",
        },
        "measure": _ref("Measure"),
        "limits": _ref("Limits"),
        "quality": {"type": "array", "items": _ref("evaluator_use")},
        **dict(zip(names, scalars, strict=True)),
        "sweep": _ref("sweep"),
        "baseline": _ref("point"),
    }


def _sweep_definitions(properties: Schema) -> Schema:
    """Dotted paths with single values (`point`), with lists of them (`axes`), and the section itself."""
    values = _paths(properties)
    options = r"^(workload|engine|model\.config|measure\.(goodput|gates|guards)|parts\.(" + "|".join(ROLES) + r"))\."
    axes = {path: {"type": "array", "items": schema, "minItems": 1} for path, schema in values.items()}
    any_axis = {options: {"type": "array", "minItems": 1}}
    group = {"type": "object", "properties": axes, "patternProperties": any_axis, "additionalProperties": False}
    clauses = {
        "zip": {"oneOf": [_ref("axes"), {"type": "array", "items": _ref("axes")}]},
        "include": {"type": "array", "items": _ref("point")},
        "exclude": {"type": "array", "items": _ref("point")},
    }
    point = {"properties": values, "patternProperties": {options: {}}, "additionalProperties": False}
    return {
        "axes": group,
        "point": {"type": "object", **point},
        "sweep": {**group, "properties": {**axes, **clauses}},
    }


def _paths(properties: Schema) -> Schema:
    """Every dotted path that a sweep may vary, with the schema of its value."""
    sections = ("model", "workload", "engine", "parts", "transforms", "measure", "limits", "quality", *SCALARS)
    paths = {name: properties[name] for name in sections}
    paths.update({f"parts.{role}": _ref(f"{role}_use") for role in ROLES})
    for section, kind in STRUCTS.items():
        names = [option.name for option in describe_options(kind) if option.name != "max_cells"]
        paths.update({f"{section}.{name}": _ref_property(kind.__name__, name) for name in names})
    return paths


def _ref_property(definition: str, name: str) -> Schema:
    return {"$ref": f"#/$defs/{definition}/properties/{name}"}
