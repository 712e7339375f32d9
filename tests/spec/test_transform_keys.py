"""The key `transforms`: loading, sweeping, digests, composing, and the schema."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_parts import GPU, MACHINE, PARTS, catalogue, write_config
from infermix.cell.parts import planned_transforms, transform_records
from infermix.compose import CellPlan, compose
from infermix.errors import UserError
from infermix.roles.component import PART_ROLES, Role
from infermix.roles.engine import EngineReport
from infermix.roles.facts import MachineFacts
from infermix.spec.load import Sweep, load_experiment
from infermix.spec.schema import experiment_schema
from json_schema_check import violations

HEAD = "model: {source: tiny.json, weights: dummy}\nworkload: load\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sweep]:
    monkeypatch.chdir(tmp_path)

    def of(text: str, *sets: str) -> Sweep:
        write_config(tmp_path)
        Path("x.yaml").write_text(HEAD + text, encoding="utf-8")
        return load_experiment("x.yaml", sets)

    return of


@pytest.fixture
def plan(load: Callable[..., Sweep]) -> Callable[..., list[CellPlan]]:
    def of(text: str, machine: MachineFacts = MACHINE) -> list[CellPlan]:
        return compose(load(text), catalogue(), machine=machine)

    return of


def names(plans: list[CellPlan]) -> list[list[str]]:
    return [[choice.component.name for choice in each.transforms] for each in plans]


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def test_a_transform_is_no_part() -> None:
    assert Role.TRANSFORM not in PART_ROLES
    assert len(PART_ROLES) == 5


def test_names_and_options(plan: Callable[..., list[CellPlan]]) -> None:
    plans = plan("transforms: [softer, {use: fuse, norms: false}]\n")
    assert names(plans) == [["softer", "fuse"]]
    assert plans[0].runs
    assert plans[0].transforms[1].options.norms is False


def test_a_sweep_varies_the_whole_list(plan: Callable[..., list[CellPlan]]) -> None:
    plans = plan(
        "sweep: {transforms: [[], [fuse], [softer, {use: fuse, norms: false}]]}\nbaseline: {transforms: []}\n"
    )
    assert names(plans) == [[], ["fuse"], ["softer", "fuse"]]
    assert [each.cell.name for each in plans] == [
        "transforms=none", "transforms=fuse", "transforms=softer+fuse[norms=false]",
    ]  # fmt: skip
    assert [each.cell.baseline for each in plans] == [True, False, False]
    assert len({each.cell.digest for each in plans}) == 3


def test_set_lays_a_list_over_the_file(load: Callable[..., Sweep]) -> None:
    (cell,) = load("transforms: [fuse]\n", "transforms=[softer]")
    assert [use.name for use in cell.experiment.transforms] == ["softer"]


def test_an_empty_list_is_the_same_cell_as_none(load: Callable[..., Sweep]) -> None:
    plain, empty = load("")[0].digest, load("transforms: []\n")[0].digest
    assert plain == empty
    assert load("transforms: [fuse]\n")[0].digest != plain
    order = [load(f"transforms: [{text}]\n")[0].digest for text in ("fuse, softer", "softer, fuse")]
    assert order[0] != order[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("transforms: fuse\n", "expected a list of transforms, got 'fuse' (write [NAME, ...])"),
        ("transforms: [fuze]\n", "no transform component is called 'fuze' (did you mean 'fuse'?"),
        ("transforms: [{use: fuse, norm: true}]\n", "unknown key (did you mean 'norms'?"),
        ("transforms: [fuse, softer, fuse]\n", "'fuse' is listed twice (a transform is applied once)"),
        ("sweep: {transforms: [fuse]}\n", "expected a list of transforms, got 'fuse'"),
        ("parts: {transform: fuse}\n", "unknown role"),
    ],
)  # fmt: skip
def test_faults(plan: Callable[..., list[CellPlan]], text: str, expected: str) -> None:
    found = message(lambda: plan(text))
    assert expected in found
    assert found.startswith("x.yaml:3:")


def test_an_engine_that_applies_none_says_so(plan: Callable[..., list[CellPlan]]) -> None:
    plans = plan("engine: whole\nsweep: {transforms: [[], [fuse, softer]]}\n")
    assert [each.reasons for each in plans] == [
        (),
        ("engine 'whole' applies no model transforms, so not 'fuse', 'softer'",),
    ]


def test_needs_and_provides_take_part(plan: Callable[..., list[CellPlan]]) -> None:
    (refused,) = plan("transforms: [gpu]\n")
    assert refused.reasons == ("transform 'gpu' needs device:cuda, this cell runs on cpu (test machine)",)
    (runs,) = plan("transforms: [gpu]\n", GPU)
    assert runs.runs
    without, with_it = plan("parts: {decoder: thing}\nsweep: {transforms: [[], [softer]]}\n")
    assert without.reasons == ("decoder 'thing' needs extra:thing, which nothing in this cell provides",)
    assert with_it.runs


def test_records_hold_what_was_asked_and_what_executed(plan: Callable[..., list[CellPlan]]) -> None:
    (only,) = plan("transforms: [softer, fuse]\n")
    planned = planned_transforms(only)
    assert [(part.name, part.options, part.executed) for part in planned] == [
        ("softer", {}, {}), ("fuse", {"norms": True}, {}),
    ]  # fmt: skip
    report = EngineReport(executed={"transforms": [{"name": "fuse", "replaced": {"norm": 3}}]})
    executed = [part.executed for part in transform_records(only, report)]
    assert executed == [{}, {"name": "fuse", "replaced": {"norm": 3}}]


@pytest.mark.parametrize(
    ("value", "valid"),
    [([], True), (["fuse"], True), ([{"use": "fuse", "norms": False}], True), ("fuse", False), (["fuze"], False)],
)  # fmt: skip
def test_the_schema_agrees(value: Any, valid: bool) -> None:
    schema = experiment_schema(PARTS)
    document = {"model": "m", "workload": "load", "transforms": value}
    assert (not violations(document, schema, schema)) is valid
    swept = {"model": "m", "workload": "load", "sweep": {"transforms": [value]}}
    assert (not violations(swept, schema, schema)) is valid
