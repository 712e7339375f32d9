"""Jobs of real libraries on the stored model: what the tests that need their environments share."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from infermix import environments
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.engine.isolated import Prepared, prepare
from infermix.plugins import load_catalogue
from infermix.roles.component import Component, Role
from infermix.roles.engine import EngineContext
from infermix.spec.experiment import ModelSource
from infermix.toolkit.calibration import CalibrationOptions
from infermix.toolkit.isolated import IsolatedQuantizer

MODEL = Path(__file__).parents[1] / "data/isolated/model"
#: Enough for every column to be seen.
CALIBRATION = CalibrationOptions(corpus="corpus.txt", num_samples=8, sample_tokens=128, first_token=1024)


def component_of(name: str) -> Component:
    """Skips the test where the environment was not made."""
    component = load_catalogue().find(Role.QUANTIZER, name).component
    assert component.environment is not None
    if environments.find_python(component.environment) is None:
        pytest.skip(f"{component.environment.command} was not called")
    return component


def quantizer_of(component: Component, options: Any, **changes: Any) -> IsolatedQuantizer:
    """`changes` are the plugin's own choices, and entries of what it hands to its worker."""
    made = component.build(options, None)
    known = {key: changes.pop(key) for key in list(changes) if key in IsolatedQuantizer.__dataclass_fields__}
    return replace(made, **known, options={**made.options, **changes})


def context_of() -> EngineContext:
    """Of a CPU cell over the stored model, in fp32."""
    source = resolve_source(ModelSource(source=str(MODEL)), Path("."))
    return EngineContext(
        source=source, facts=read_model_facts(source, dtype="float32"), machine=machine_facts("cpu"), dtype="float32",
        parts={}, max_model_len=64, max_num_seqs=1, seed=0, clock_ns=time.perf_counter_ns, base=MODEL,
        find=load_catalogue().find,
    )  # fmt: skip


def run_job(quantizer: IsolatedQuantizer, options: Any) -> Prepared:
    return prepare(quantizer, options, context_of())
