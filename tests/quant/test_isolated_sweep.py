"""A sweep over quantizers of another environment: missing, well, wrong, dead."""

from __future__ import annotations

import sys
from pathlib import Path

import infermix
import pytest
import yaml
from infermix import environments
from infermix.cli import main

MODEL = Path(__file__).parents[1] / "data/isolated/model"
PLUGIN = Path(__file__).with_name("isolated_plugin.py")


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calibration = {
        "corpus": str(MODEL / "corpus.txt"), "num_samples": 2, "sample_tokens": 64, "first_token": 1024,
    }  # fmt: skip
    cells = [{"use": "stand_in", "fault": fault, "calibration": calibration} for fault in ("none", "rope", "crash")]
    document = {
        "name": "elsewhere",
        "model": str(MODEL),
        "dtype": "float32",
        "workload": {"use": "synthetic", "num_requests": 1, "input_tokens": 8, "output_tokens": 4},
        "measure": {"repeats": 1, "max_warmup": 1},
        "limits": {"num_threads": 1},
        "sweep": {"parts.quantizer": cells},
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def _make_environment() -> None:
    """Our own interpreter under another name."""
    from infermix.extra_plugins import load_extra_plugins

    (plugin,) = load_extra_plugins((str(PLUGIN),)).values()
    folder = environments.location(plugin.ENVIRONMENT)
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / "infermix-environment.json").write_text('{"packages": {}}')


def test_without_the_environment_every_cell_names_the_command(experiment: Path, tmp_path: Path) -> None:
    records = infermix.run(experiment, out=tmp_path / "out", extra_plugins=(str(PLUGIN),), ceilings=False)
    assert {record.state for record in records} == {"invalid"}
    assert all("infermix env create stand-in" in record.reason for record in records)


@pytest.mark.full
def test_the_job_comes_before_the_cell(experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _make_environment()
    records = infermix.run(experiment, out=tmp_path / "out", extra_plugins=(str(PLUGIN),), ceilings=False)
    well, wrong, dead = records
    assert well.state == "ok", well.reason
    executed = well.parts["quantizer"].executed
    assert executed["from_cache"] is True, "the cell found what its job had made"
    assert executed["gates"]["quantized_perplexity"] < 1.5 * executed["gates"]["unquantized_perplexity"]
    assert executed["quantize_s"] > 0
    assert (wrong.state, wrong.metrics) == ("wrong", {})
    assert "in the environment 'stand-in'" in wrong.reason
    assert dead.state == "error"
    assert "the last thing that the library said" in dead.reason
    main(["show", str(next((tmp_path / "out").glob("*.json")))])
    assert "stand_in" in capsys.readouterr().out
