"""`infermix new-plugin`: what it writes installs and passes its own tests; bad requests leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from infermix import cli
from infermix.commands.new_plugin import write_plugin
from infermix.errors import UserError


def run(*arguments: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_a_written_plugin_installs_and_passes_its_tests(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    project, site = tmp_path / "mine", tmp_path / "site"
    assert cli.main(["new-plugin", "chunky-one", "--directory", str(project)]) == 0
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    installed = run(*pip, "--target", str(site), ".", cwd=project, path=site)
    assert installed.returncode == 0, installed.stderr
    tested = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project, path=site)
    assert tested.returncode == 0, tested.stdout
    listed = run("-m", "infermix.cli", "plugins", "attention", cwd=project, path=site)
    assert "chunky-one: " in listed.stdout
    assert "from infermix-chunky-one 0.1.0 (infermix_chunky_one.plugin)" in listed.stdout


def test_the_project_file_names_the_entry_point(tmp_path: Path) -> None:
    write_plugin("mine", tmp_path / "a" / "b")
    project = tomllib.loads((tmp_path / "a" / "b" / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["infermix"] == {"infermix_mine": "infermix_mine.plugin"}
    written = sorted(
        str(p.relative_to(tmp_path / "a" / "b")) for p in (tmp_path / "a" / "b").rglob("*") if p.is_file()
    )
    assert written == [
        "README.md", "pyproject.toml", "src/infermix_mine/__init__.py", "src/infermix_mine/attention.py",
        "src/infermix_mine/plugin.py", "src/infermix_mine/py.typed", "tests/test_infermix_mine.py",
    ]  # fmt: skip
    assert "$" not in "".join(p.read_text() for p in (tmp_path / "a" / "b").rglob("*") if p.is_file())
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"], "no scratch folder stays"


@pytest.mark.parametrize("name", ["", "Mine", "3d", "a b", "../x", "a-", "a--b", "naïve", "sdpa", "triton"])
def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="NAME"):
        write_plugin(name, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["reference", "transformers", "lm-eval", "lm_eval", "kernels"])
def test_names_that_would_hide_a_module_are_refused(name: str, tmp_path: Path) -> None:
    module = "infermix_" + name.replace("-", "_")
    with pytest.raises(UserError, match=f"NAME: the package would hide the module '{module}'"):
        write_plugin(name, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="is there already"):
        write_plugin("mine", tmp_path / "x")
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["mine.txt"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    write_plugin("mine", tmp_path / "x")
    assert (tmp_path / "x" / "pyproject.toml").is_file()
