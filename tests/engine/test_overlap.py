"""Reading tokens one step late changes when they arrive, nothing else, and keeps nothing of a request that ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from infermix.engine.lanes import Lanes
from infermix.engine.native import NativeEngine
from infermix.roles.decoder import Emission
from infermix.roles.engine import EngineReport
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.roles.request import FinishReason, Request, SamplingParams, Sequence
from infermix.roles.scheduler import Plan
from infermix_reference.kv_paged import PagedLayout
from infermix_reference.scheduler_continuous import ContinuousScheduler
from infermix_schedulers.predicted import PredictedShortestScheduler

Build = Callable[..., Any]
STOP = 9


@dataclass
class ScriptedDecoder:
    """Emits what `script` says per request and output position; notes which sequences each launch saw."""

    script: dict[str, list[int]]
    launches: list[list[str]] = field(default_factory=list)

    def launch(self, plan: Plan, runner: Any, sampler: Any) -> list[tuple[Sequence, int]]:
        ready = [e.sequence for e in plan.entries if e.num_new_tokens == e.sequence.num_uncomputed]
        self.launches.append([seq.request.request_id for seq in ready])
        return [(seq, self._token(seq)) for seq in ready]

    def _token(self, seq: Sequence) -> int:
        script = self.script[seq.request.request_id]
        return script[min(seq.num_output_tokens, len(script) - 1)]

    def collect(self, ticket: list[tuple[Sequence, int]]) -> list[Emission]:
        return [Emission(seq, (token,)) for seq, token in ticket]


def scripted(
    script: dict[str, list[int]], lag: int, num_blocks: int = 1000, scheduler: Any = None
) -> tuple[NativeEngine, ScriptedDecoder]:
    """A native engine over blocks of 2 tokens, without a model."""
    layout, group = PagedLayout(2), KVGroup((0,), 1, 4, 4)
    shape = layout.shape((group,), KVBudget(8, 16, 4, max_bytes=(num_blocks + 1) * 2 * 8 * 4))
    decoder = ScriptedDecoder(script)
    ticks = iter(range(10**9))
    engine = NativeEngine(
        context=SimpleNamespace(  # type: ignore[arg-type]
            clock_ns=lambda: next(ticks),
            max_model_len=16,
            facts=SimpleNamespace(vocab_size=100, max_position_embeddings=64),
            machine=SimpleNamespace(device="cpu"),
        ),
        report=EngineReport(),
        tokenizer=None,
        eos_token_ids=(STOP,),
        joint=SimpleNamespace(detach=lambda: None),  # type: ignore[arg-type]
        runner=SimpleNamespace(  # type: ignore[arg-type]
            reset_counters=lambda: None, counters=dict, copy_blocks=lambda: None
        ),
        sampler=SimpleNamespace(reset=lambda: None, forget=lambda lane: None),  # type: ignore[arg-type]
        space=layout.space(shape),
        store=None,  # type: ignore[arg-type]
        shape=shape,
        scheduler=scheduler or ContinuousScheduler(max_num_seqs=8, max_num_batched_tokens=64),
        decoder=decoder,
        lanes=Lanes(8),
        lag=lag,
    )
    return engine, decoder


def submit(engine: Any, name: str, prompt: int = 3, **sampling: Any) -> None:
    engine.submit(Request(request_id=name, prompt_ids=(1,) * prompt, sampling=SamplingParams(**sampling)))


def drain(engine: Any) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
    tokens: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    for _ in range(500):
        if not engine.has_work:
            return tokens, ends
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                assert event.request_id not in ends
                ends[event.request_id] = event.finish_reason
    raise AssertionError("the engine did not finish")


@pytest.mark.parametrize("lag", [0, 1])
def test_tokens_come_one_step_late(lag: int) -> None:
    engine, _ = scripted({"a": [11, 12, 13, 14]}, lag)
    submit(engine, "a", max_new_tokens=4)
    arrived = [[token for event in engine.step() for token in event.token_ids] for _ in range(4 + lag)]
    assert arrived == [[]] * lag + [[11], [12], [13], [14]]
    assert not engine.has_work


@pytest.mark.parametrize("lag", [0, 1])
def test_a_stop_found_late_discards_what_was_launched_meanwhile(lag: int) -> None:
    engine, decoder = scripted({"a": [11, STOP, 13, 14]}, lag)
    submit(engine, "a", max_new_tokens=10)
    tokens, ends = drain(engine)
    assert (tokens, ends) == ({"a": [11, STOP]}, {"a": FinishReason.STOP})
    assert len(decoder.launches) == 2 + lag
    assert engine._space.usage().allocated_tokens == 0
    assert len(engine._lanes._free) == 8
    submit(engine, "b", max_new_tokens=2)
    decoder.script["b"] = [21, 22]
    assert drain(engine) == ({"b": [21, 22]}, {"b": FinishReason.LENGTH})
    assert engine.report().counters["discarded_tokens"] == lag


@pytest.mark.parametrize("lag", [0, 1])
def test_a_scheduler_learns_what_was_emitted_and_forgets_with_the_engine(lag: int) -> None:
    """Neither what was launched past a stop nor what a reset cuts off teaches; counters of a repeat begin at 0."""
    scheduler = PredictedShortestScheduler(8, 64, chunked=False, swap=False, watermark=0.0, token_s=0.01)
    engine, _ = scripted({"a": [11, 12, STOP], "b": [11, STOP], "c": [11, 12, 13, 14]}, lag, scheduler=scheduler)

    def figures() -> list[float]:
        names = ("unpredicted_outputs", "predicted_outputs", "predicted_output_error_tokens")
        return [engine.report().counters[name] for name in names]

    for name in "ab":
        submit(engine, name, max_new_tokens=10)
        drain(engine)
    assert figures() == [1, 1, 1], "2 tokens after a prediction of 3"
    submit(engine, "c", max_new_tokens=10)
    engine.step()
    engine.reset()
    assert figures() == [0, 0, 0]
    submit(engine, "c", max_new_tokens=4)
    drain(engine)
    assert figures() == [1, 0, 0], "nothing was left to predict from"


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_exactly_max_new_tokens_are_launched(lag: int, count: int) -> None:
    engine, decoder = scripted({"a": [11]}, lag)
    submit(engine, "a", max_new_tokens=count)
    assert drain(engine) == ({"a": [11] * count}, {"a": FinishReason.LENGTH})
    assert decoder.launches == [["a"]] * count
    assert engine.report().counters["discarded_tokens"] == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_a_stop_token_counts_from_min_new_tokens_on(lag: int) -> None:
    """The sampler withholds stops before that; a token that comes all the same does not end the request."""
    engine, _ = scripted({"a": [STOP, STOP, STOP, STOP]}, lag)
    submit(engine, "a", max_new_tokens=10, min_new_tokens=3)
    assert drain(engine) == ({"a": [STOP] * 3}, {"a": FinishReason.STOP})


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_blocks", [8, 9, 11, 14])
def test_preemption_with_tokens_in_flight_loses_and_repeats_nothing(lag: int, num_blocks: int) -> None:
    names = "abcd"
    script = {name: [20 + 10 * index + step for step in range(8)] for index, name in enumerate(names)}
    engine, _ = scripted(script, lag, num_blocks)
    for name in names:
        submit(engine, name, max_new_tokens=8)
    tokens, ends = drain(engine)
    assert tokens == script
    assert set(ends.values()) == {FinishReason.LENGTH}
    assert engine.report().counters["preemptions"] > 0
    assert engine._space.usage().allocated_tokens == 0
    assert len(engine._lanes._free) == 8


def test_a_victim_that_stops_in_flight_does_not_come_back() -> None:
    script = {"a": [20] * 20, "b": [30] * 20}
    for stop in range(1, 8):
        script["b"] = [30] * stop + [STOP] + [31] * 20
        engine, _ = scripted(script, 1, 8)
        submit(engine, "a", max_new_tokens=8)
        submit(engine, "b", max_new_tokens=9)
        tokens, _ = drain(engine)
        assert tokens == {"a": [20] * 8, "b": [30] * stop + [STOP]}
        assert engine._space.usage().allocated_tokens == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_reset_with_tokens_in_flight_starts_afresh(lag: int) -> None:
    engine, _ = scripted({"a": [11, 12, 13]}, lag)
    submit(engine, "a", max_new_tokens=3)
    engine.step()
    engine.reset()
    assert not engine.has_work
    submit(engine, "a", max_new_tokens=3)
    assert drain(engine)[0] == {"a": [11, 12, 13]}
    assert engine.report().counters["discarded_tokens"] == 0


def tokens_of(engine: Any, seed: int, **sampling: Any) -> dict[str, list[int]]:
    import random

    rng = random.Random(seed)
    for name in "abcdef":
        prompt = tuple(rng.randrange(6, 96) for _ in range(rng.randrange(1, 40)))
        params = SamplingParams(max_new_tokens=rng.randrange(1, 16), seed=ord(name), **sampling)
        engine.submit(Request(request_id=name, prompt_ids=prompt, sampling=params))
    return drain(engine)[0]


@pytest.mark.parametrize("kv", ["none", "concat", "dense", ("paged", {"block_size": 4})])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.5}, {"min_new_tokens": 4}],
    ids=["greedy", "sampled", "penalised", "late stop"],
)  # fmt: skip
def test_a_real_model_gives_the_same_tokens_with_overlap(
    build_engine: Build, kv: Any, sampling: dict[str, Any]
) -> None:
    off = build_engine({"kv": kv}, engine={"overlap": "off"})
    on = build_engine({"kv": kv}, engine={"overlap": "on"})
    assert tokens_of(on, 1, **sampling) == tokens_of(off, 1, **sampling)


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"repetition_penalty": 1.5}], ids=["greedy", "penalised"])
def test_a_real_model_under_memory_pressure_gives_the_same_tokens_with_overlap(
    build_engine: Build, sampling: dict[str, Any]
) -> None:
    parts = {"kv": ("paged", {"block_size": 4})}
    pressed = {"max_model_len": 56, "kv_memory_bytes": 2 * 2 * 32 * 4 * 64}
    on = build_engine(parts, engine={"overlap": "on"}, **pressed)
    tokens = tokens_of(on, 2, **sampling)
    assert on.report().counters["preemptions"] > 0
    assert tokens == tokens_of(build_engine(parts, engine={"overlap": "off"}), 2, **sampling)
