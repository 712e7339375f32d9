"""`infermix new-plugin`: a working plugin package to start from."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path
from string import Template

from infermix.errors import UserError
from infermix.plugins import load_catalogue
from infermix.roles.component import Role

HELP = (
    "Write a plugin package with an attention backend of its own, its options and its conformance test. "
    "It installs with `pip install -e .` and passes."
)
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
#: Template -> where it goes; `{package}` is the import name.
_LAYOUT = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "package_init.py": "src/{package}/__init__.py",
    "plugin.py": "src/{package}/plugin.py",
    "attention.py": "src/{package}/attention.py",
    "test_plugin.py": "tests/test_{package}.py",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the attention backend in experiments, e.g. my-attention")
    parser.add_argument("--directory", type=Path, metavar="D", help="where to write it (default: ./infermix-NAME)")


def execute(args: argparse.Namespace) -> int:
    directory = args.directory or Path(f"infermix-{args.name}")
    write_plugin(args.name, directory)
    print(
        f"wrote {directory}\n\n  cd {directory}\n  pip install -e '.[test]'\n  pytest\n  infermix plugins attention"
    )
    return 0


def write_plugin(name: str, directory: Path) -> None:
    """Write the package; all of it or nothing. Raises `UserError` for a bad name or a directory with content."""
    _check_name(name)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} is there already", where="--directory", hint="nothing is overwritten")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".new-plugin-") as scratch:
            built = Path(scratch) / "plugin"
            _render(name, built)
            if directory.exists():
                directory.rmdir()
            shutil.move(built, directory)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=str(directory)) from None


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is not a plugin name", key="NAME", hint="lower-case letters, digits and dashes: my-attention"
        )
    catalogue = load_catalogue()
    taken = catalogue.components[Role.ATTENTION]
    if name in taken:
        by = taken[name].provenance.distribution
        raise UserError(f"there is an attention component {name!r} already, from {by}", key="NAME")
    if (Role.ATTENTION, name) in catalogue.clashes:
        raise UserError(catalogue.clashes[Role.ATTENTION, name], key="NAME")
    package = _package(name)
    if importlib.util.find_spec(package) is not None:
        raise UserError(f"the package would hide the module {package!r}, which is installed", key="NAME")


def _package(name: str) -> str:
    return "infermix_" + name.replace("-", "_")


def _render(name: str, target: Path) -> None:
    package = _package(name)
    words = {
        "name": name,
        "package": package,
        "distribution": package.replace("_", "-"),
        "class_name": "".join(word.capitalize() for word in re.split("[-_]", name)),
    }
    folder = files("infermix") / "templates" / "plugin"
    for source, place in _LAYOUT.items():
        path = target / place.format(package=package)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (folder / f"{source}.tmpl").read_text(encoding="utf-8")
        path.write_text(Template(text).substitute(words), encoding="utf-8")
    (target / "src" / package / "py.typed").touch()
