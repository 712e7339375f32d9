"""Every family that `roles.families` promises, each in a process of its own with capped memory."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import packed_walk as walk
import pytest
from infermix.roles.families import DRIVEN
from test_families import NAMED

#: Some families came later, some attended on their own before: there a refusal is right, a wrong answer never.
OLDER = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2])) < (5, 24)
WORKER = Path(__file__).with_name("family_worker.py")


def run_worker(family: str) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(WORKER), family], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(DRIVEN - set(NAMED)))
def test_driven_family(family: str) -> None:
    result = run_worker(family)
    if result["state"] != "ran" and OLDER:
        pytest.skip(result["reason"])
    assert result["state"] == "ran", result["reason"]
    assert max(result["errors"].values()) < walk.TOLERANCE
