"""Quantizers in environments of their own: the job, its gates, its cache, and what reaches the worker.

Our own interpreter stands in for the environment, a script of ours for the library.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from infermix import environments
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.engine.isolated import Prepared, prepare
from infermix.engine.loader import load_model
from infermix.errors import InfermixError, Unsupported, UserError, WrongResult
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.engine import EngineContext
from infermix.roles.environment import Environment
from infermix.roles.quantizer import QuantizerContext
from infermix.spec.experiment import ModelSource
from infermix.toolkit import isolated_worker
from infermix.toolkit.calibration import CalibratedOptions, CalibrationOptions
from infermix.toolkit.isolated import IsolatedQuantizer
from safetensors.torch import load_file

MODEL = Path(__file__).parents[1] / "data/isolated/model"
SCRIPT = Path(__file__).with_name("isolated_script.py")
OPTIONS = CalibratedOptions(
    calibration=CalibrationOptions(corpus="corpus.txt", num_samples=2, sample_tokens=64, first_token=1024)
)


def _quantizer(fault: str = "none", **changes: Any) -> IsolatedQuantizer:
    made = IsolatedQuantizer(
        name="stand-in", method="rtn of a stand-in", script=SCRIPT, options={"fault": fault},
        environment=Environment(name="stand-in", summary="ours", pythons=("3.11",), pins=("nothing==1",)),
    )  # fmt: skip
    return replace(made, **changes)


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]) -> EngineContext:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environments, "find_python", lambda environment: Path(sys.executable))
    source = resolve_source(ModelSource(source=str(MODEL)), Path("."))
    return EngineContext(
        source=source, facts=read_model_facts(source, dtype="float32"), machine=machine_facts("cpu"), dtype="float32",
        parts={}, max_model_len=64, max_num_seqs=1, seed=0, clock_ns=time.perf_counter_ns, base=MODEL,
        progress=lambda phase, fraction: seen.append(phase), find=load_catalogue().find,
    )  # fmt: skip


def _left(context: EngineContext, tmp_path: Path) -> list[str]:
    folder = tmp_path / "infermix/quantized"
    return [path.name for path in folder.iterdir() if path.is_dir()]


def test_a_job_makes_a_checkpoint_once(
    context: EngineContext, seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    made = prepare(_quantizer(), OPTIONS, context)
    assert "stand-in: quantize" in seen
    assert not list(here.iterdir())
    gates = made.facts["gates"]
    assert gates["unquantized_perplexity_there"] == pytest.approx(gates["unquantized_perplexity"], rel=1e-4)
    assert 1 < gates["quantized_perplexity"] / gates["unquantized_perplexity"] < 1.5
    report = _read(made, context)
    assert report.method == "rtn of a stand-in"
    assert report.bits_per_weight == pytest.approx(5.0, abs=0.2)
    assert report.details["environment"] == {"name": "stand-in", "pins": ["nothing==1"]}
    assert report.details["calibration"]["token_ids_sha256"]
    assert report.details["versions"]["safetensors"]
    again = prepare(_quantizer(), OPTIONS, replace(context, progress=_never))
    assert (made.facts["from_cache"], again.facts["from_cache"]) == (False, True)
    assert _left(context, tmp_path) == [made.facts["checkpoint"]]


@pytest.fixture
def _same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's own code without a process of its own, which costs seconds."""

    def work(python: Path, script: Path, request: Path, on_event: Callable[..., None], who: str) -> None:
        asked = json.loads(request.read_text())
        tokens = load_file(asked["tokens"])
        job = isolated_worker.Job(
            model=Path(asked["model"]), result=Path(asked["result"]), device=asked["device"], dtype=asked["dtype"],
            options=asked["options"], samples=tokens["samples"].tolist(),
        )  # fmt: skip
        monkeypatch.setattr(isolated_worker.Job, "send", lambda self, event: on_event(event))
        module = isolated_worker._import_script(str(script))
        response = isolated_worker.run(module, job, tokens["windows"].tolist())
        Path(asked["response"]).write_text(json.dumps(response))

    monkeypatch.setattr("infermix.engine.isolated.run_worker", work)


def _never(phase: str, fraction: float) -> None:
    raise AssertionError(f"{phase}: nothing is left to do")


def _read(made: Prepared, context: EngineContext) -> Any:
    loaded = load_model(made.source, context.facts, dtype="float32", device="cpu", packed=True)
    return made.read(loaded, context, tune=False)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("rope", WrongResult, r"has a perplexity of .* in the environment 'stand-in' and of .* here"),
        ("zeros", WrongResult, r"when read back, .* times the unquantized"),
    ],
)
@pytest.mark.usefixtures("_same_process")
def test_what_goes_wrong_is_said_and_not_kept(
    fault: str, error: type[Exception], words: str, context: EngineContext, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        prepare(_quantizer(fault), OPTIONS, context)
    assert _left(context, tmp_path) == []


@pytest.mark.usefixtures("_same_process")
def test_how_much_worse_a_checkpoint_may_be_is_asked_whenever_it_is_used(context: EngineContext) -> None:
    lax = _quantizer("zeros", most_perplexity_ratio=1e6)
    assert prepare(lax, OPTIONS, context).facts["from_cache"] is False
    assert prepare(lax, OPTIONS, context).facts["from_cache"] is True
    with pytest.raises(WrongResult, match=r"most_perplexity_ratio 1\.5"):
        prepare(_quantizer("zeros"), OPTIONS, context)


def test_a_worker_that_dies_leaves_its_last_words(context: EngineContext, tmp_path: Path) -> None:
    with pytest.raises(InfermixError, match=r"exit code 7; its last lines: .*the last thing that the library said"):
        prepare(_quantizer("crash"), OPTIONS, context)
    assert _left(context, tmp_path) == []


def test_everything_that_decides_the_result_is_in_the_key(context: EngineContext, tmp_path: Path) -> None:
    from infermix.engine.isolated import _calibration, _key, load_tokenizer

    tokenizer = load_tokenizer(context.source)
    other_script = tmp_path / "other.py"
    other_script.write_text(SCRIPT.read_text() + "\n")
    plain = _quantizer()
    environment = replace(plain.environment, pins=("nothing==2",))
    samples = CalibratedOptions(calibration=replace_struct(OPTIONS.calibration, seed=5))
    cases: list[tuple[IsolatedQuantizer, CalibratedOptions]] = [
        (plain, OPTIONS), (plain, samples), (_quantizer("zeros"), OPTIONS), (_quantizer(name="other"), OPTIONS),
        (_quantizer(config_form="transformers-4"), OPTIONS), (_quantizer(script=other_script), OPTIONS),
        (_quantizer(environment=environment), OPTIONS),
    ]  # fmt: skip
    keys = {_key(each, context, _calibration(options, context, tokenizer)) for each, options in cases}
    assert len(keys) == len(cases)
    renamed = replace(plain.environment, summary="the same packages in other words")
    data = _calibration(OPTIONS, context, tokenizer)
    assert _key(plain, context, data) == _key(_quantizer(environment=renamed), context, data)


def replace_struct(options: CalibrationOptions, **changes: Any) -> CalibrationOptions:
    import msgspec

    return msgspec.structs.replace(options, **changes)


def test_a_missing_environment_names_the_command(context: EngineContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "find_python", lambda environment: None)
    with pytest.raises(UserError, match="infermix env create stand-in"):
        prepare(_quantizer(), OPTIONS, context)


def test_a_group_size_that_does_not_fit_is_refused_before_the_job(context: EngineContext) -> None:
    with pytest.raises(UserError, match="group size 48 does not divide the 128 inputs"):
        prepare(_quantizer(group_size=48), OPTIONS, context)


def test_a_loaded_model_is_not_converted() -> None:
    with pytest.raises(Unsupported, match="makes a checkpoint from files"):
        _quantizer().apply(None, QuantizerContext("cpu", "float32"))  # type: ignore[arg-type]


def test_the_worker_imports_nothing_of_ours() -> None:
    import ast

    from infermix.toolkit.worker_process import WORKER

    isolated = [each.component for each in load_catalogue().all(Role.QUANTIZER) if each.component.environment]
    scripts = {WORKER, *(component.build(component.options(), None).script for component in isolated)}
    assert len(scripts) > 1
    for script in scripts:
        nodes = list(ast.walk(ast.parse(script.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert [name for name in names if name.startswith("infermix")] == [], script


def test_a_worker_of_an_old_transformers_gets_the_old_config(
    context: EngineContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}

    def stop(python: Path, script: Path, request: Path, on_event: Callable[..., None], who: str) -> None:
        asked = json.loads(request.read_text())
        found.update(json.loads((Path(asked["model"]) / "config.json").read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr("infermix.engine.isolated.run_worker", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(_quantizer(config_form="transformers-4"), OPTIONS, context)
    assert (found["rope_theta"], found["torch_dtype"]) == (100000.0, "float16")
    assert "rope_parameters" not in found
