"""Option structs: every fault at once, each at its path."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from infermix.errors import UserErrors
from infermix.roles.component import Options
from infermix.spec.options import describe_options
from infermix.spec.validate import Report, check_struct, check_value
from msgspec import Meta


class Poisson(msgspec.Struct, tag_field="use", tag="poisson", forbid_unknown_fields=True):
    rate: Annotated[float, Meta(gt=0, extra={"unit": "requests/s"})]


class Burst(msgspec.Struct, tag_field="use", tag="burst", forbid_unknown_fields=True):
    size: int = 3


class Sample(Options, frozen=True, kw_only=True):
    size: Annotated[int, Meta(ge=1, le=64, description="tokens in one block", extra={"unit": "tokens"})] = 16
    mode: Literal["fast", "slow"] = "fast"
    path: str
    arrivals: Poisson | Burst | None = None
    names: tuple[str, ...] = ("a",)
    shares: dict[str, Annotated[float, Meta(gt=0)]] = {}

    def __post_init__(self) -> None:
        if self.mode == "slow" and self.size > 32:
            raise ValueError("slow needs size <= 32")


def check(data: Any) -> tuple[Sample | None, list[str]]:
    report = Report()
    value = check_struct(data, Sample, (), report)
    return value, [str(error) for error in report.errors]


def test_good_options_convert() -> None:
    value, errors = check(
        {"path": "p", "size": 8, "arrivals": {"use": "poisson", "rate": 2}, "names": ["x"], "shares": {"k": 1}}
    )
    assert errors == []
    assert value == Sample(path="p", size=8, arrivals=Poisson(2.0), names=("x",), shares={"k": 1.0})


@pytest.mark.parametrize(
    ("data", "errors"),
    [
        ({}, ["'path' is missing"]),
        (
            {"path": 3, "size": 0, "mode": "fats", "bolck": 1},
            [
                "bolck: unknown key (known: arrivals, mode, names, path, shares, size)",
                "size: expected int >= 1, got 0",
                "mode: expected one of the known values, got 'fats' (did you mean 'fast'? known: fast, slow)",
                "path: expected str, got 3",
            ],
        ),
        ({"path": "p", "size": True}, ["size: expected int, got True"]),
        ({"path": "p", "size": "8"}, ["size: expected int, got '8'"]),
        ({"path": "p", "size": None}, ["size: expected int, got nothing"]),
        ({"path": "p", "mode": "slow", "size": 40}, ["slow needs size <= 32"]),
        ({"path": "p", "names": ["a", 3]}, ["names[1]: expected str, got 3"]),
        ({"path": "p", "shares": {"a": 1, "b": 0, "c": "x"}},
         ["shares.b: expected float > 0.0, got 0", "shares.c: expected float, got 'x'"]),
        ({"path": "p", "arrivals": {"use": "poisson", "rat": 1}},
         ["arrivals.rat: unknown key (did you mean 'rate'? known: rate)", "arrivals: 'rate' is missing"]),
        ({"path": "p", "arrivals": {"use": "poison"}},
         ["arrivals.use: expected one of the known values, got 'poison' (did you mean 'poisson'"]),
        ([1], ["expected a mapping, got [1]"]),
    ],
)  # fmt: skip
def test_faults(data: Any, errors: list[str]) -> None:
    value, found = check(data)
    assert value is None
    assert len(found) == len(errors), found
    for line, expected in zip(found, errors, strict=True):
        assert line.startswith(expected)


def test_plain_values_are_checked_too() -> None:
    report = Report(lambda path, key=False: "f.yaml:3:1")
    assert check_value(3, int, ("a",), report) == 3
    assert check_value("x", int, ("a",), report) is None
    check_value("x", int, ("a",), report)
    with pytest.raises(UserErrors) as caught:
        report.raise_any()
    assert str(caught.value) == "f.yaml:3:1: a: expected int, got 'x'", "the same fault once"


def test_options_are_described() -> None:
    size, mode, path, arrivals, names, shares = describe_options(Sample)
    assert (size.type, size.unit, size.range, size.default) == ("int", "tokens", "1 <= x <= 64", 16)
    assert size.description == "tokens in one block"
    assert (mode.type, mode.default) == ("fast | slow", "fast")
    assert (path.required, path.default) == (True, None)
    assert arrivals.type == "{use: poisson, rate} | {use: burst, size?} | null"
    assert (names.type, names.default) == ("list of str", ["a"])
    assert (shares.type, shares.default) == ("mapping of float", {})
