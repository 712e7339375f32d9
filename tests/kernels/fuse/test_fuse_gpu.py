"""Fused models in the native engine on a GPU: the tokens of the reference parts, eagerly and from CUDA graphs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuse_models import FUSED, tiny
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.plugins import load_catalogue
from infermix.roles.component import PART_ROLES, Choice, Role
from infermix.roles.engine import EngineContext
from infermix.roles.request import Request, SamplingParams
from infermix.spec.experiment import DEFAULT_PARTS, ModelSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Build = Callable[..., Any]


def _choice(role: Role, name: str, **options: Any) -> Choice:
    registered = load_catalogue().find(role, name)
    return Choice(registered, registered.component.options(**options))


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def engine(family: str, attention: str, kv: str, transforms: tuple[str, ...], graphs: str) -> Any:
        directory = tmp_path / "model"
        if not directory.exists():
            tiny(*FUSED[family]).save_pretrained(directory)
        source = resolve_source(ModelSource(source=str(directory)), Path("."))
        names = {**DEFAULT_PARTS, "attention": attention, "kv": kv}
        context = EngineContext(
            source=source,
            facts=read_model_facts(source, dtype="float32", dummy=False),
            machine=machine_facts("cuda"),
            dtype="float32",
            parts={role: _choice(role, names[role.value]) for role in PART_ROLES},
            transforms=tuple(_choice(Role.TRANSFORM, name) for name in transforms),
            max_model_len=128,
            max_num_seqs=8,
            seed=0,
            clock_ns=time.perf_counter_ns,
        )
        native = _choice(Role.ENGINE, "native", graphs=graphs)
        return native.component.build(native.options, context)

    return engine


def _tokens(engine: Any) -> dict[str, list[int]]:
    rng = random.Random(0)
    tokens: dict[str, list[int]] = {}
    for number in range(9):
        prompt = tuple(rng.randrange(6, 96) for _ in range(rng.randrange(1, 60)))
        sampling = SamplingParams(max_new_tokens=rng.randrange(4, 16), ignore_eos=True)
        engine.submit(Request(request_id=str(number), prompt_ids=prompt, sampling=sampling))
        tokens[str(number)] = []
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    engine.close()
    return tokens


@pytest.mark.parametrize("family", FUSED)
def test_greedy_tokens_are_those_of_the_reference_parts(build: Build, family: str) -> None:
    expected = _tokens(build(family, "eager", "dense", (), "off"))
    for kv, graphs in (("paged", "auto"), ("paged", "off"), ("dense", "auto")):
        engine = build(family, "triton", kv, ("fuse", "skinny_linear"), graphs)
        report = engine.report()
        (fused, _) = report.executed["transforms"]
        assert fused["replaced"]["decoder layer"] >= 2
        assert (report.graphs["captured"] > 0) == (graphs == "auto")
        assert _tokens(engine) == expected
