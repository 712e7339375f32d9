"""The catalogue: broken plugins and clashing names take nothing else down."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from infermix import api
from infermix.commands import plugins as command
from infermix.errors import UserError
from infermix.hookspecs import hookimpl
from infermix.plugins import load_catalogue
from infermix.roles.component import Component, Role

OWN = Component(name="own", role=Role.KV, summary="only here", build=print)
EAGER = Component(name="eager", role=Role.ATTENTION, summary="the same name", build=print)


@hookimpl
def infermix_kv() -> list[Component]:
    return [OWN]


@hookimpl
def infermix_attention() -> list[Component]:
    return [EAGER]


PLUGIN = SimpleNamespace(infermix_kv=infermix_kv, infermix_attention=infermix_attention, __name__="rival")


def test_components_of_one_name_cannot_be_used_and_others_can() -> None:
    catalogue = load_catalogue({"rival": PLUGIN})
    text = "2 attention components are called 'eager', from infermix (infermix_reference.plugin) and rival (rival)"
    assert catalogue.clashes == {(Role.ATTENTION, "eager"): text}
    assert "eager" not in catalogue.components[Role.ATTENTION]
    with pytest.raises(UserError, match=r"2 attention components are called 'eager'.*uninstall one of them"):
        catalogue.find(Role.ATTENTION, "eager")
    assert catalogue.find(Role.KV, "own").component is OWN


def test_a_component_under_the_wrong_hook_is_an_error_of_its_plugin() -> None:
    catalogue = load_catalogue({"odd": SimpleNamespace(infermix_kv=infermix_attention)})
    assert catalogue.errors["odd"] == "infermix_kv offers 'eager', whose role is attention"
    assert catalogue.find(Role.ATTENTION, "eager").provenance.distribution == "infermix"


def test_the_listing_shows_a_clash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load_catalogue", lambda: load_catalogue({"rival": PLUGIN}))
    assert command.execute(Namespace(role=None, json=False)) == 0
    shown = capsys.readouterr().out
    assert "2 attention components are called 'eager'" in shown
    assert "own: only here" in shown
    assert command.execute(Namespace(role=None, json=True)) == 0
    assert "attention eager" in json.loads(capsys.readouterr().out)["errors"]


def test_only_experiments_that_use_the_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "load_catalogue", lambda extra: load_catalogue({"rival": PLUGIN}))
    path = tmp_path / "x.yaml"
    text = "model: {source: shape:llama-3-8b, weights: dummy}\nworkload: synthetic\nparts: {attention: NAME}\n"
    path.write_text(text.replace("NAME", "eager"))
    with pytest.raises(
        UserError, match=r"x\.yaml:3:20: parts.attention.use: 2 attention components are called 'eager'"
    ):
        api.plan(path)
    path.write_text(text.replace("NAME", "sdpa"))
    assert len(api.plan(path)) == 1
