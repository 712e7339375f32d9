"""The house: arrows, stray packages, light commands, short files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("harness", "kernels", "plugins")
HEAVY = ("torch", "transformers", "triton")


def sources() -> list[Path]:
    return [path for root in ROOTS for path in (ROOT / root).rglob("*.py")]


def test_import_contracts_hold() -> None:
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_stray_packages() -> None:
    stray = [f"{root}/__init__.py" for root in ROOTS if (ROOT / root / "__init__.py").exists()]
    stray += [str(path) for path in (ROOT / "tests").rglob("__init__.py")]
    assert stray == []


def test_test_modules_have_unique_names() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_every_package_is_typed() -> None:
    packages = [path for root in ROOTS for path in (ROOT / root).iterdir() if (path / "__init__.py").exists()]
    assert packages
    assert [str(package) for package in packages if not (package / "py.typed").exists()] == []


def test_the_command_line_stays_small() -> None:
    assert len((ROOT / "harness/infermix/cli.py").read_text().splitlines()) < 250


def test_files_stay_short() -> None:
    assert [str(path) for path in sources() if len(path.read_text().splitlines()) > 400] == []


def test_functions_stay_short() -> None:
    lengths = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lengths[f"{path.relative_to(ROOT)}:{node.name}:{node.lineno}"] = node.end_lineno - node.lineno + 1
    assert [name for name, length in lengths.items() if length > 50 and not name.startswith("kernels/")] == []
    assert sorted(lengths.values())[len(lengths) // 2] <= 9


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plugins"],
        ["schema"],
        ["plan", "experiments/quickstart.yaml"],
        ["cost", "shape:llama-3-8b"],
        ["leaderboard", "results", "--out", "{tmp}"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_light_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    command = (
        "import sys; from infermix.cli import main\n"
        f"try: code = main({arguments!r})\n"
        "except SystemExit as stop: code = stop.code\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.rstrip().splitlines()[-1] in ("HEAVY [] 0", "HEAVY [] None"), done.stderr


def test_nothing_names_a_machine_path() -> None:
    home = "/" + "work/"
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    guilty = []
    for name in tracked:
        path = ROOT / name
        if path.is_file() and path.stat().st_size < 2_000_000 and home in path.read_text(errors="ignore"):
            guilty.append(name)
    assert guilty == []
