"""A Python process of its own: Triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_python(arguments: list[str], **environment: str) -> str:
    """What it prints, with this folder on its path; `TRITON_INTERPRET` only as given. It must succeed."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(Path(__file__).parent), variables.get("PYTHONPATH", "")])
    variables |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
