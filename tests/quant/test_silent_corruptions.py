"""Libraries that go wrong without a word, replayed from what the real ones left: the gates stop them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from infermix import environments
from infermix.errors import WrongResult
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from isolated_jobs import CALIBRATION, MODEL, context_of, quantizer_of, run_job

DATA = MODEL.parent


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environments, "find_python", lambda environment: Path(sys.executable))


def _replay(monkeypatch: pytest.MonkeyPatch, name: str, made: Path | None, events: list[dict[str, Any]]) -> Any:
    """A job whose worker says `events` and leaves the tensors of `made`."""

    def work(python: Path, script: Path, request: Path, on_event: Callable[..., None], who: str) -> None:
        asked = json.loads(request.read_text())
        for event in events:
            on_event(event)
        assert made is not None
        shutil.copy(made / "model.safetensors", asked["result"])
        quantization = json.loads((made / "config.json").read_text())["quantization_config"]
        Path(asked["response"]).write_text(json.dumps({"quantization_config": quantization, "figures": {}}))

    monkeypatch.setattr("infermix.engine.isolated.run_worker", work)
    component = load_catalogue().find(Role.QUANTIZER, name).component
    options = component.options(group_size=32, calibration=CALIBRATION)
    return run_job(quantizer_of(component, options), options)


def _same_perplexity() -> list[dict[str, Any]]:
    """Of a worker whose libraries read the checkpoint as ours do."""
    from infermix.engine.loader import load_model, load_tokenizer
    from infermix.toolkit.isolated_worker import perplexity

    context = context_of()
    tokenizer = load_tokenizer(context.source)
    assert tokenizer is not None
    ids = tokenizer.encode((MODEL / "corpus.txt").read_text())
    windows = [ids[start : start + 256] for start in range(0, 1024, 256)]
    model = load_model(context.source, context.facts, dtype="float32", device="cpu").model
    return [{"perplexity": perplexity(model, windows, "cpu")}]


def test_a_wrong_rotary_base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events = [json.loads(line) for line in (DATA / "events_wrong_rope.jsonl").read_text().splitlines()]
    with pytest.raises(WrongResult, match=r"perplexity of 117\.28 in the environment 'auto-gptq' and of 24\.1 here"):
        _replay(monkeypatch, "auto_gptq", None, events)
    assert [path for path in (tmp_path / "infermix/quantized").iterdir() if path.is_dir()] == []


def test_weights_that_a_search_has_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongResult, match=r"autoawq.* has a perplexity of 80\.\d+ when read back, 3\.\d+ times"):
        _replay(monkeypatch, "autoawq", DATA / "awq_overwritten", _same_perplexity())


@pytest.mark.parametrize(("name", "folder"), [("autoawq", "awq"), ("auto_gptq", "gptq_v1")])
def test_what_the_libraries_made_well_is_kept(name: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gates = _replay(monkeypatch, name, DATA / folder, _same_perplexity()).facts["gates"]
    assert 1.1 < gates["quantized_perplexity"] / gates["unquantized_perplexity"] < 1.25


def test_zero_points_read_by_the_other_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the config claims no symmetry (which would give it away), the gate sees it."""
    other = tmp_path / "other"
    shutil.copytree(DATA / "gptq_v1", other)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"].update(checkpoint_format="gptq_v2", sym=False)
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(WrongResult, match="when read back"):
        _replay(monkeypatch, "auto_gptq", other, _same_perplexity())
