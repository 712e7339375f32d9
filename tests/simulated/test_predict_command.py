"""calibrate, run, predict: the whole way on a tiny model, with processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from infermix.cli import main
from infermix.record.record import Summary
from infermix.record.store import scan_records
from infermix.report.board import build_board

EXPERIMENT = """\
name: {name}
model: {model}
device: cpu
dtype: float32
seed: {seed}
workload: {{use: synthetic, num_requests: 60, input_tokens: {{use: uniform, min: 4, max: 60}},
  output_tokens: {{use: uniform, min: 4, max: 30}}, {arrivals}}}
measure: {{repeats: 1, warmup: 1, max_warmup: 1}}
limits: {{num_threads: 1}}
parts: {{scheduler: {{use: continuous, max_num_seqs: 8}}}}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=5, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def write(path: Path, **values: object) -> Path:
    path.write_text(EXPERIMENT.format(**values))
    return path


@pytest.mark.full
def test_predictions_of_held_out_runs_are_published(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fitted = write(tmp_path / "fit.yaml", name="fit", model=model, seed=1, arrivals="concurrency: 6")
    held = write(tmp_path / "held.yaml", name="held", model=model, seed=2, arrivals="concurrency: 4")
    calibration, measured, predicted = tmp_path / "c.json", tmp_path / "measured", tmp_path / "predicted"
    assert main(["calibrate", str(fitted), "--out", str(calibration), "--records", str(tmp_path / "fit")]) == 0
    assert main(["run", str(held), "--out", str(measured), "--no-ceilings"]) == 0
    command = ["predict", str(held), "--measured", str(measured), "--calibration", str(calibration)]
    assert main([*command, "--out", str(predicted)]) == 0
    report = json.loads((predicted / "prediction_error.json").read_text())
    (row,) = report["cells"]
    assert row["held_out"]
    assert {"output_tokens_per_s", "ttft_s_p50", "tpot_s_p50"} <= set(row["figures"])
    (record,), (real,) = (scan_records(each, Summary).records for each in (predicted, measured))
    for name, figure in row["figures"].items():  # how large errors are is up to how busy the machine is
        assert (figure["predicted"], figure["measured"]) == (record.metrics[name].value, real.metrics[name].value)
        assert figure["error"] == pytest.approx(figure["predicted"] / figure["measured"] - 1)
    assert "largest, held out" in capsys.readouterr().out
    assert record.simulated
    assert record.engine is not None
    assert record.engine.executed["step_times"]["from"] == "calibration"
    assert record.engine.executed["step_times"]["differs"] == []
    assert len(build_board([record, real]).tables) == 2
