"""Environments of parts whose libraries do not get along with ours: made, found, removed. Imports no torch.

Each lies in the user's cache under its name and the digest of its pins: other pins are another environment. One that
was not finished has no mark and counts as missing; the next attempt begins anew.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infermix.errors import InfermixError, UserError
from infermix.paths import cache_dir
from infermix.roles.environment import Environment

#: Written last: holds what was installed.
_MARK = "infermix-environment.json"
_LAST_LINES = 5

Say = Callable[[str], None]


def location(environment: Environment) -> Path:
    """Where it lies, or would lie."""
    return cache_dir("environments") / f"{environment.name}-{environment.digest}"


def find_python(environment: Environment) -> Path | None:
    """Its interpreter; `None` when the environment is missing or unfinished."""
    python = _python(location(environment))
    return python if (location(environment) / _MARK).is_file() and python.exists() else None


def packages(environment: Environment) -> dict[str, str]:
    """Name -> version of what is installed in it. Raises `UserError` when it is missing."""
    mark = location(environment) / _MARK
    if not mark.is_file():
        raise missing(environment)
    found: dict[str, str] = json.loads(mark.read_text(encoding="utf-8"))["packages"]
    return found


def missing(environment: Environment) -> UserError:
    return UserError(f"the environment {environment.name!r} is not there", hint=environment.command)


def create(environment: Environment, say: Say) -> Path:
    """Make it unless it is there; returns its interpreter.

    Raises `UserError` when no fitting Python or installer is found, `InfermixError` with the installer's last lines
    when it fails. Whatever ends it early, what was installed so far is not taken for an environment.
    """
    folder = location(environment)
    with _lock(folder):
        found = find_python(environment)
        if found is not None:
            return found
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _install(environment, folder, say)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return _python(folder)


def remove(name: str) -> list[Path]:
    """Delete every environment of that name, of whatever pins, finished or not; returns the deleted folders."""
    folders = [path for path in _folders() if path.name.rpartition("-")[0] == name]
    for folder in folders:
        with _lock(folder):
            (folder / _MARK).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    return folders


def strays(known: Sequence[Environment]) -> list[Path]:
    """Folders that belong to none of `known`: other pins, or a plugin that is gone."""
    return [path for path in _folders() if path not in {location(each) for each in known}]


def _folders() -> list[Path]:
    return sorted(path for path in cache_dir("environments").iterdir() if path.is_dir())


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with folder.with_suffix(".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _install(environment: Environment, folder: Path, say: Say) -> None:
    make, install = _installer(environment, folder)
    say(f"making {folder}")
    _run(make)
    for requirements, more in ((environment.pins, ()), (environment.no_deps, ("--no-deps",))):
        if requirements:
            say(f"installing {' '.join((*more, *requirements))}")
            _run([*install, *more, *requirements])
    content = {"name": environment.name, "digest": environment.digest, "packages": _installed(folder)}
    (folder / _MARK).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _installer(environment: Environment, folder: Path) -> tuple[list[str], list[str]]:
    """The command that makes the environment, and the one that installs requirements into it."""
    uv, python = shutil.which("uv"), str(_python(folder))
    if uv:
        make = [uv, "venv", "--quiet", "--python", environment.pythons[0], str(folder)]
        return make, [uv, "pip", "install", "--quiet", "--python", python]
    if importlib.util.find_spec("pip") is None and (environment.pins or environment.no_deps):
        raise UserError("neither uv nor pip is here", hint="install one of them: it fills the environment")
    make = [_interpreter(environment), "-m", "venv", "--without-pip", str(folder)]
    return make, [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]


def _interpreter(environment: Environment) -> str:
    """Of a version that the libraries work with. Raises `UserError` when there is none."""
    own = ".".join(platform.python_version_tuple()[:2])
    for version in environment.pythons:
        path = sys.executable if version == own else shutil.which(f"python{version}")
        if path:
            return path
    versions = " or ".join(environment.pythons)
    raise UserError(
        f"the environment {environment.name!r} needs Python {versions}; this is {own}, and the PATH has no other",
        hint="put one on the PATH, or install uv, which fetches it",
    )


def _run(command: Sequence[str]) -> None:
    """Raises `InfermixError` with the last lines of a command that failed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stdout.splitlines() if line.strip()][-_LAST_LINES:]
        raise InfermixError(f"`{' '.join(command)}` failed with exit code {done.returncode}:\n" + "\n".join(last))


def _installed(folder: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}, sort_keys=True))"
    )
    done = subprocess.run([_python(folder), "-I", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InfermixError(f"the new environment does not start: {done.stderr.strip()}")
    found: dict[str, str] = json.loads(done.stdout)
    return found
