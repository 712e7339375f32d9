"""`infermix cost` and `infermix doctor`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from infermix.commands import cost, doctor
from infermix.cost.machine import machine_facts, store_ceilings
from infermix.errors import UserError
from infermix.measure import ceilings as measured
from infermix.paths import cache_dir
from infermix.roles.facts import Ceilings


def run(module: Any, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    code: int = module.execute(parser.parse_args(arguments))
    return code


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(cost, *arguments, "--json") == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


H200 = ("--copy-gbs", "4280", "--tflops", "685", "--memory-gb", "141", "--device", "cpu")


def test_cost_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, "shape:llama-3-8b", "--context", "1088", "--batch", "64", *H200)
    assert data["num_parameters"] == 8_030_261_248
    assert data["kv_bytes_per_token"] == 131_072
    assert data["phases"]["decode"]["ideal_s"] == pytest.approx(5.64e-3, abs=5e-6)
    assert data["phases"]["decode"]["binds"] == "bandwidth"
    assert data["phases"]["prefill"]["binds"] == "compute"
    assert data["ridge"] == pytest.approx(160.0, abs=0.1)
    assert data["fits"] is True
    assert data["sequences_that_fit"] > 64


def test_parts_change_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, "shape:llama-3-8b", *H200)
    parts = ("--parts", "quantizer=rtn:bits=4,group_size=64", "kv=paged:block_size=32")
    small = answer(capsys, "shape:llama-3-8b", *parts, *H200)
    assert small["bits_per_weight"] == 4.25
    assert small["weight_bytes"] < 0.4 * plain["weight_bytes"]
    assert small["kv_bytes_per_token"] == plain["kv_bytes_per_token"]
    assert small["ridge_rows"] == pytest.approx(plain["ridge_rows"] * 4.25 / 16)
    none = answer(capsys, "shape:llama-3-8b", "--parts", "kv=none", *H200)
    assert none["kv_bytes_per_seq"] == 0
    assert none["phases"]["decode"]["flops"] == pytest.approx(none["phases"]["prefill"]["flops"])


def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cost, "shape:mixtral-8x7b", *H200) == 0
    text = capsys.readouterr().out
    for word in ("46,702,792,704", "expert", "router", "prefill", "decode", "at best", "ridge", "memory"):
        assert word in text


def test_without_ceilings_no_time_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, "shape:smollm2-135m", "--device", "cpu", "--dtype", "float64")
    assert data["phases"]["decode"]["ideal_s"] is None
    assert run(cost, "shape:smollm2-135m", "--device", "cpu", "--dtype", "float64") == 0
    assert "doctor --measure" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shape:lama-3-8b",), "no shape"),
        (("shape:llama-3-8b", "--context", "9000"), "8192 positions"),
        (("shape:llama-3-8b", "--parts", "attention=sdpa"), "no part that changes the cost"),
        (("shape:llama-3-8b", "--parts", "quantizer"), "no part that changes the cost"),
        (("shape:llama-3-8b", "--parts", "kv=pagd"), "no kv component"),
        (("shape:llama-3-8b", "--parts", "quantizer=rtn:bitz=4"), "bitz"),
        (("shape:llama-3-8b", "--dtype", "bf16"), "unknown dtype"),
        (("shape:llama-3-8b", "--device", "tpu"), "unknown device"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(cost, *arguments)


@pytest.mark.parametrize(
    "arguments", [("--batch", "0"), ("--batch", "x"), ("--tflops", "-1"), ("--memory-gb", "nan")]
)
def test_bad_numbers(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        run(cost, "shape:llama-3-8b", *arguments)


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    store_ceilings(machine_facts("cpu"), Ceilings(2e10, {"float32": 1e11}, "2026-01-01T00:00:00+00:00"))
    assert run(doctor, "--json", "--device", "cpu") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["devices"]["cpu"]["copy_bytes_per_s"] == 2e10
    assert data["libraries"]["torch"]
    ready = {(entry["role"], entry["name"]): entry["ready"] for entry in data["components"]}
    assert ready["kv", "paged"] is True
    assert data["plugin_errors"] == {}


def test_doctor_shows_measured_launch_parameters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(doctor, "--device", "cpu") == 0
    assert "measured launch parameters: none" in capsys.readouterr().out
    folder = cache_dir("kernels")
    (folder / "attention-GPU.json").write_text('{"source": "abc", "entries": {"a": {}, "b": {}}}')
    (folder / "matmul-GPU.json").write_text("{")
    assert run(doctor, "--json", "--device", "cpu") == 0
    assert json.loads(capsys.readouterr().out)["launch_tables"] == {"attention-GPU": 2, "matmul-GPU": 0}


def test_doctor_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(doctor) == 0
    text = capsys.readouterr().out
    for word in ("cpu", "usable cores", "torch", "paged", "ready", "ceilings"):
        assert word in text


def test_doctor_measures_and_stores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ceilings = Ceilings(3e10, {"float32": 2e11}, "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr(measured, "measure_ceilings", lambda device, threads: ceilings)
    assert run(doctor, "--measure", "--device", "cpu", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["devices"]["cpu"]["copy_bytes_per_s"] == 3e10
    assert machine_facts("cpu").ceilings == ceilings
    with pytest.raises(UserError, match="no number of threads"):
        run(doctor, "--measure", "--threads", "0")


def test_commands_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from infermix.cli import main\n"
        "assert main(['cost', 'shape:llama-3-8b', '--device', 'cpu', '--json', '--parts', 'kv=paged']) == 0\n"
        "assert main(['doctor', '--json']) == 0\n"
        "heavy = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(str(sorted(heavy)) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kv_bytes_are_those_of_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`paged` keeps whole contexts in windowed layers, `hybrid` a ring of 512 + 511 tokens in blocks of 16."""
    config = {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "sliding_window": 512,
              "max_position_embeddings": 8192, "torch_dtype": "float32"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    token = 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, width, bytes
    for layout, tokens in (("paged", 4096), ("hybrid", 1024)):
        asked = ("--device", "cpu", "--context", "4096", "--batch", "3", "--dtype", "float32")
        found = answer(capsys, str(tmp_path / "config.json"), *asked, "--parts", f"kv={layout}")
        assert found["kv_bytes_per_seq"] == tokens * token
        assert found["memory"]["kv_bytes"] == (3 * tokens + 16) * token  # and the sink block
