"""Merging of experiment trees: `extends` and `--set`."""

from __future__ import annotations

from infermix.spec.yaml_marks import Node

#: Keys that say which thing a mapping describes: another value means another thing, so nothing is inherited.
_IDENTITY = ("use", "source")


def merge(below: Node, above: Node) -> Node:
    """`above` laid over `below`: mappings merge, everything else (lists too) is replaced."""
    if not isinstance(below.value, dict) or not isinstance(above.value, dict) or _differ(below, above):
        return above
    merged = dict(below.value)
    for key, child in above.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, above.place, {**below.keys, **above.keys})


def _differ(below: Node, above: Node) -> bool:
    return any(
        key in below.value and key in above.value and below.value[key].value != above.value[key].value
        for key in _IDENTITY
    )
