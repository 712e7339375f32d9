"""YAML with places: the core schema, strictness, and where faults are reported."""

from __future__ import annotations

import pytest
from infermix.errors import UserError
from infermix.spec.yaml_marks import dotted, parse_yaml


def fault(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "x.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("1e-3", 0.001),
        ("1e3", 1000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("-3", -3),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("'3'", "3"),
        ('"true"', "true"),
        ("!!str 3", "3"),
        ("=", "="),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}", "x.yaml").plain()["key"]
    assert found == value
    assert type(found) is type(value)


def test_places_count_from_one() -> None:
    tree = parse_yaml("a: 1\nb:\n  c: [x, {d: 2}]\n", "dir/x.yaml")
    assert str(tree.locate(("a",))) == "dir/x.yaml:1:4"
    assert str(tree.locate(("b", "c", 1, "d"))) == "dir/x.yaml:3:14"
    assert str(tree.locate(("b", "c", 1, "d"), key=True)) == "dir/x.yaml:3:11"
    assert str(tree.locate(("b", "c", 7, "d"))) == "dir/x.yaml:3:6", "the nearest thing that is there"


def test_anchors_are_shared_values() -> None:
    assert parse_yaml("a: &x {k: 1}\nb: *x", "x.yaml").plain() == {"a": {"k": 1}, "b": {"k": 1}}


def test_every_fault_is_reported_at_once() -> None:
    text = fault("a: 1\na: 2\nb: {c: .inf, c: 3}\n3: x\n")
    assert text.splitlines() == [
        "x.yaml:2:1: a: appears twice; first at line 1",
        "x.yaml:3:8: b.c: '.inf' is not a finite number",
        "x.yaml:3:14: b.c: appears twice; first at line 3",
        "x.yaml:4:1: keys must be text, not '3' (quote it)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.yaml: is empty"),
        ("# only a comment\n", "x.yaml: is empty"),
        ("a: 1\n---\nb: 2", "x.yaml:2:1: holds several documents (one experiment per file)"),
        ("a: {b: 1\n", "x.yaml:2:1: not valid YAML: did not find expected ',' or '}'"),
        ("a: b: c", "x.yaml:1:5: not valid YAML: mapping values are not allowed in this context"),
        ("a: *nowhere", "x.yaml:1:4: not valid YAML: found undefined alias"),
        ("a: 99999999999999999999", "x.yaml:1:4: a: '99999999999999999999' is not a 64-bit integer"),
        ("a: !!python/object:os.system x", "tag 'tag:yaml.org,2002:python/object:os.system' is not supported"),
        ("<<: {a: 1}", "x.yaml:1:1: <<: merge keys are not supported"),
        ("a: &x [*x]", "is too large"),
        ("a: \x00", "x.yaml: not readable as YAML"),
        ("[" * 5000, "not valid YAML"),
    ],
)
def test_faults_name_their_place(text: str, message: str) -> None:
    assert message in fault(text)


def test_alias_bombs_are_refused() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "is too large" in fault("\n".join(lines))


def test_paths_are_dotted() -> None:
    assert dotted(("quality", 0, "use")) == "quality[0].use"


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "a:\n  b: 1\n\tc: 2\n", "a:\n - x\n \t- y\n", "\ta: 1\n"])
def test_a_tab_in_the_indentation_is_called_by_its_name(text: str) -> None:
    assert fault(text).endswith("not valid YAML: a tab indents this line (indent with spaces)")


def test_tabs_elsewhere_are_fine() -> None:
    assert parse_yaml("a:\tb\nc: [1,\n\t2]\n", "x.yaml").plain() == {"a": "b", "c": [1, 2]}
    assert "a tab" not in fault("a:\tb\nc:\t@x\n")
