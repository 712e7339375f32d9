"""Prompts in one process, outputs in another: the same tokens as one engine, and the record says how KV came."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.errors import InfermixError, Unsupported, UserError
from infermix.measure.drive import drive
from infermix.plugins import Catalogue
from infermix.roles.component import PART_ROLES, Choice, Role
from infermix.roles.engine import EngineContext
from infermix.roles.request import Request, SamplingParams
from infermix.spec.experiment import DEFAULT_PARTS, ModelSource

Build = Callable[..., Any]


@pytest.fixture
def build(catalogue: Catalogue, tiny_llama: Any) -> Any:
    """`build("disaggregated", parts={...}, **context)`."""
    built = []

    def make(name: str, parts: dict[str, tuple[str, dict[str, Any]]] | None = None, **given: Any) -> Any:
        def choose(role: Role, part: str, options: dict[str, Any]) -> Choice:
            registered = catalogue.find(role, part)
            return Choice(registered, registered.component.options(**options))

        wanted = {**{role: (part, {}) for role, part in DEFAULT_PARTS.items()}, **(parts or {})}
        source = resolve_source(ModelSource(source=str(tiny_llama)), tiny_llama)
        context = EngineContext(
            source=source, facts=read_model_facts(source, dtype="float32", dummy=False), machine=machine_facts("cpu"),
            dtype="float32", parts={role: choose(role, *wanted[role.value]) for role in PART_ROLES},
            max_model_len=128, max_num_seqs=4, seed=0, clock_ns=time.perf_counter_ns, find=catalogue.find, **given,
        )  # fmt: skip
        engine = choose(Role.ENGINE, name, {})
        built.append(engine.component.build(engine.options, context))
        return built[-1]

    yield make
    for engine in built:
        engine.close()


def requests(count: int = 8) -> list[Request]:
    return [
        Request(
            request_id=str(index),
            prompt_ids=tuple((7 * index + place) % 90 + 6 for place in range(3 + 9 * (index % 3))),
            sampling=SamplingParams(
                max_new_tokens=1 + (5 * index) % 12,
                temperature=0.7 * (index % 2),
                seed=index,
                ignore_eos=index % 3 > 0,
            ),
        )
        for index in range(count)
    ]


def outputs(engine: Any, asked: list[Request]) -> dict[str, tuple[list[int], str]]:
    repeat = drive(engine, asked, None, keep_outputs=len(asked))
    return {sample.request_id: (sample.output_ids, sample.finish_reason) for sample in repeat.requests}


def test_two_workers_give_the_tokens_of_one_engine(build: Any) -> None:
    asked = requests()
    alone = outputs(build("native"), asked)
    engine = build("disaggregated")
    assert outputs(engine, asked) == alone
    counters = engine.report().counters
    handed = [request for request in asked if len(alone[request.request_id][0]) > 1]
    assert counters["handovers"] == len(handed) > 3
    assert counters["handover_bytes"] > 0
    assert counters["handover_export_s"] > 0
    assert counters["handover_import_s"] > 0
    assert engine.report().executed["engine"]["handover"] == {"path": "shared host memory", "workers": 2}
    decoded = sum(len(tokens) - 1 for tokens, _ in alone.values())
    assert counters["computed_tokens"] == decoded, "the decode worker computes no prompt"
    engine.reset()
    assert outputs(engine, asked) == alone
    with pytest.raises(UserError, match="needs"):
        engine.submit(Request(request_id="long", prompt_ids=(7,) * 500))


@pytest.mark.full
def test_kv_that_finds_no_room_waits(build: Any) -> None:
    asked = requests()
    alone = outputs(build("native"), asked)
    parts = {"kv": ("paged", {"block_size": 4}), "scheduler": ("continuous", {"max_num_seqs": 2})}
    engine = build("disaggregated", parts, kv_memory_bytes=2 * 80_000)
    assert outputs(engine, asked) == alone


@pytest.mark.full
def test_a_dead_worker_is_told(build: Any) -> None:
    engine = build("disaggregated")
    engine._prefill._process.kill()
    with pytest.raises(InfermixError, match="prefill worker ended"):
        drive(engine, requests(3), None)


@pytest.mark.full
def test_layouts_that_cannot_be_handed_over_are_refused(build: Any) -> None:
    with pytest.raises(Unsupported):
        build("disaggregated", {"kv": ("none", {})})
