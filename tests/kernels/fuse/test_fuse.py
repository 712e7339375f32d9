"""Transforms and quantizers of `infermix_triton` without a GPU: interpreted, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parent


@pytest.mark.parametrize("module", ["fuse_interpreted.py", "quantizers_interpreted.py", "selector_interpreted.py"])
def test_interpreted(module: str) -> None:
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(FOLDER / module)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
