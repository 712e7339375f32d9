"""Environments of their own: made, found, listed, removed, and never taken for ready when they are not."""

from __future__ import annotations

import platform
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from infermix import environments
from infermix.cli import main
from infermix.errors import InfermixError, UserError
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.environment import Environment

OWN = ".".join(platform.python_version_tuple()[:2])
EMPTY = Environment(name="empty", summary="nothing", pythons=(OWN,))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)  # no uv: the same everywhere


def _wheel(folder: Path) -> str:
    """A package that needs another one which does not exist."""
    path, info = folder / "tiny_part-1.5-py3-none-any.whl", "tiny_part-1.5.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_part.py", "ANSWER = 42\n")
        metadata = "Metadata-Version: 2.1\nName: tiny-part\nVersion: 1.5\nRequires-Dist: no-such-thing-at-all==9\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"tiny-part @ file://{path}"


def test_made_once_with_what_was_asked_for(tmp_path: Path) -> None:
    environment = replace(EMPTY, no_deps=(_wheel(tmp_path),))
    assert environments.find_python(environment) is None
    said: list[str] = []
    python = environments.create(environment, said.append)
    assert environments.find_python(environment) == python
    assert environments.packages(environment) == {"tiny-part": "1.5"}
    done = subprocess.run([python, "-I", "-c", "import tiny_part; print(tiny_part.ANSWER)"], capture_output=True)
    assert done.stdout.strip() == b"42"
    assert len(said) == 2
    assert environments.create(environment, said.append) == python
    assert len(said) == 2


def test_one_that_fails_or_is_interrupted_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(EMPTY, pins=(f"x @ file://{tmp_path}/x-1-py3-none-any.whl",))
    with pytest.raises(InfermixError, match=r"failed with exit code 1:\n.*x-1-py3-none-any.whl"):
        environments.create(broken, print)
    assert not environments.location(broken).exists()

    def interrupt(folder: Path) -> dict[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(environments, "_installed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        environments.create(EMPTY, print)
    assert environments.find_python(EMPTY) is None
    assert not environments.location(EMPTY).exists()


def test_one_that_was_killed_half_way_is_made_anew() -> None:
    stale = environments.location(EMPTY) / "bin" / "python"
    stale.parent.mkdir(parents=True)
    stale.write_text("half a copy")
    assert environments.find_python(EMPTY) is None
    python = environments.create(EMPTY, print)
    assert subprocess.run([python, "-c", ""]).returncode == 0


def test_other_pins_are_another_environment() -> None:
    other = replace(EMPTY, pins=("a==1",))
    assert environments.location(other) != environments.location(EMPTY)
    assert environments.location(replace(EMPTY, summary="said otherwise")) == environments.location(EMPTY)
    environments.create(EMPTY, print)
    assert environments.find_python(other) is None
    assert environments.strays([other]) == [environments.location(EMPTY)]
    assert environments.strays([other, EMPTY]) == []


def test_removed_whatever_the_pins() -> None:
    environments.create(EMPTY, print)
    half = environments.location(replace(EMPTY, pins=("a==1",)))
    half.mkdir()
    assert sorted(environments.remove("empty")) == sorted([environments.location(EMPTY), half])
    assert environments.find_python(EMPTY) is None
    assert environments.remove("empty") == []


def test_a_python_that_nobody_has() -> None:
    with pytest.raises(UserError, match=r"'empty' needs Python 2\.2; this is 3\."):
        environments.create(replace(EMPTY, pythons=("2.2",)), print)


def test_a_component_without_its_environment_names_the_command() -> None:
    registered = load_catalogue().find(Role.QUANTIZER, "auto_gptq")
    assert registered.unavailable == "needs the environment 'auto-gptq': infermix env create auto-gptq"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list"]) == 0
    assert "missing: infermix env create auto-gptq" in capsys.readouterr().out
    assert main(["env", "create", "auto-gtpq"]) == 2
    assert "did you mean 'auto-gptq'?" in capsys.readouterr().err
    assert main(["env", "create"]) == 2
    assert "needs a name" in capsys.readouterr().err
    environments.location(EMPTY).mkdir(parents=True)
    assert main(["env", "remove", "empty"]) == 0
    assert main(["env", "remove", "empty"]) == 2
    assert shutil.which("anything") is None
