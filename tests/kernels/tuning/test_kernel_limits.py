"""The script behind the kernel rows of the table of limits, interpreted on tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "bench" / "limits" / "kernel_limits.py"


def _run(*arguments: str) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_rows_survive_missing_peers_and_are_resumed(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    _run("--out", str(out), "--only", "decode B=2*", "linears W8A8 int8 M=1")
    content = json.loads(out.read_text())
    rows = {(row["row"], row["contender"]): row for row in content["rows"]}
    ours = rows["linears W8A8 int8 M=1", "ours"]
    assert ours["value"] > 0
    assert ours["error"] < 2e-2
    assert ours["of_target"] == pytest.approx(80.0 / ours["value"])
    peer = rows["decode B=2 ctx=40", "FA3 paged block 16"]
    assert (peer["value"], peer["failure"][:19]) == (None, "ModuleNotFoundError")
    assert set(content["ceilings"]) == {"copy", "matmul"}
    said = _run("--out", str(out), "--only", "linears W8A8 int8 M=1", "--resume")
    again = {(row["row"], row["contender"]): row for row in json.loads(out.read_text())["rows"]}
    assert again["linears W8A8 int8 M=1", "ours"] == ours
    assert again["decode B=2 ctx=40", "ours block 16"] == rows["decode B=2 ctx=40", "ours block 16"]
    assert "CUTLASS" in said


def test_a_wrong_result_gets_no_figure(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from kernel_timing import Goal, Sheet\n"
        "sheet = Sheet(lambda each: None)\n"
        "goal = Goal('us', False, 2.0)\n"
        "for error in (0.01, 0.5, float('nan')):\n"
        "    sheet.add('row', f'error {error}', goal, lambda: (1.0, error), ours=True)\n"
        "print([(row.value, row.of_target) for row in sheet.rows])\n"
    )
    command = [sys.executable, "-c", code, str(SCRIPT.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[(1.0, 2.0), (None, None), (None, None)]"
