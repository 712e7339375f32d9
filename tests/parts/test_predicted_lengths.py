"""`shortest_first` by predicted lengths: what it learns, from whom, when it forgets, and what that is worth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any

import msgspec
import pytest
from infermix.measure.foresight import foresight
from infermix.measure.metrics import summarise
from infermix.plugins import load_catalogue
from infermix.record.record import Repeat
from infermix.roles.component import Role
from infermix.roles.request import FinishReason, Request, SamplingParams, Sequence
from infermix.roles.scheduler import Plan
from infermix.toolkit.conformance.scheduler import CountingSpace
from infermix_schedulers.predicted import OutputPredictor

SCHEDULERS = {each.component.name: each.component for each in load_catalogue().all(Role.SCHEDULER)}
MOST = 64


def build(length: str = "predicted", most: int = 1, **options: Any) -> Any:
    component = SCHEDULERS["shortest_first"]
    return component.build(msgspec.convert({"length": length, **options}, component.options), most)


def sequence(seq_id: int, prompt: int = 4, most: int = MOST, **request: Any) -> Sequence:
    made = Request(
        request_id=f"r{seq_id}", prompt_ids=(1,) * prompt, sampling=SamplingParams(max_new_tokens=most), **request
    )
    return Sequence(seq_id, made, [1] * prompt, prompt)


def ended(seq_id: int, output: int, reason: FinishReason = FinishReason.STOP, **changes: Any) -> Sequence:
    made = sequence(seq_id, **changes)
    made.tokens += [1] * output
    made.finish_reason = reason
    return made


@dataclass
class Engine:
    """Serves without a model, a second a step: sequence i stops after `outputs[i]` tokens."""

    scheduler: Any
    outputs: dict[int, int]
    space: CountingSpace = field(default_factory=lambda: CountingSpace(10**6))
    now_s: float = 0.0
    order: list[int] = field(default_factory=list)
    ends_s: dict[int, float] = field(default_factory=dict)
    preemptions: int = 0

    def step(self) -> Plan:
        plan: Plan = self.scheduler.schedule(self.space, self.now_s)
        self.now_s += 1
        self.preemptions += len(plan.preempted)
        for entry in plan.entries:
            self._advance(entry.sequence, entry.num_new_tokens)
        return plan

    def _advance(self, seq: Sequence, new: int) -> None:
        if seq.seq_id not in self.order:
            self.order.append(seq.seq_id)
        seq.num_computed += new
        if seq.num_uncomputed:
            return
        seq.tokens.append(1)
        if seq.num_output_tokens == self.outputs[seq.seq_id]:
            stopped = seq.num_output_tokens < seq.request.sampling.max_new_tokens
            seq.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            self.ends_s[seq.seq_id] = self.now_s
            self.scheduler.finish(seq)
            self.space.release(seq.seq_id)

    def serve(self, sequences: Iterable[Sequence], every_s: float = 0.0) -> list[float]:
        """Times from arrival to end; one arrives each `every_s`, at 0 all at once."""
        arrivals = {index * every_s: seq for index, seq in enumerate(sequences)} if every_s else {}
        for seq in () if every_s else sequences:
            self.scheduler.add(seq)
        begin_s = dict.fromkeys(self.outputs, 0.0) | {seq.seq_id: at for at, seq in arrivals.items()}
        waiting = list(arrivals.items())
        while waiting or self.scheduler.num_waiting or self.scheduler.num_running:
            while waiting and waiting[0][0] <= self.now_s:
                self.scheduler.add(waiting.pop(0)[1])
            self.step()
        return [end_s - begin_s[seq_id] for seq_id, end_s in self.ends_s.items()]


def test_the_order_follows_what_ended() -> None:
    """At first all are equally long, so the order is that of arrival; then the talkative tenant goes last."""
    engine = Engine(build(), {0: 40, 1: 2, 2: 40, 3: 2})
    engine.serve([sequence(0, tenant="talks"), sequence(1, tenant="terse")])
    assert engine.order == [0, 1], "nothing has ended: max_new_tokens of both"
    engine.serve([sequence(2, tenant="talks"), sequence(3, tenant="terse")])
    assert engine.order == [0, 1, 3, 2]


def test_a_prediction_is_fixed_when_its_request_is_queued() -> None:
    """1 is queued before anything ended, with 64 tokens, and keeps them; 2, queued after 0 gave 3, overtakes it."""
    engine = Engine(build(ageing_s_per_token=100.0), {0: 3, 1: 3, 2: 3})
    engine.scheduler.add(sequence(0))
    engine.scheduler.add(sequence(1))
    while 0 not in engine.ends_s:
        engine.step()
    engine.serve([sequence(2)])
    assert engine.order == [0, 2, 1]


def test_the_finest_group_that_has_ended_predicts() -> None:
    predictor = OutputPredictor()
    asked = iter(range(100, 200))

    def predicted(**changes: Any) -> float:
        return predictor.predict(sequence(next(asked), **changes))

    assert predicted(tenant="a") == MOST, "nothing has ended"
    predictor.ended(ended(0, 10, tenant="a", prompt=4))
    predictor.ended(ended(1, 30, tenant="a", prompt=8))
    assert predicted(tenant="a", prompt=7) == 10, "4 to 7 are one power of two"
    assert predicted(tenant="a", prompt=15) == 30
    assert predicted(tenant="a", prompt=16) == pytest.approx(10 + 0.2 * 20), "the tenant's: the newest counts 0.2"
    assert predicted(tenant="b", prompt=4) == pytest.approx(14), "all, whatever their prompts"
    predictor.ended(ended(2, 50, tenant="a", category="chat", prompt=4))
    assert predicted(tenant="a", prompt=4) == 10, "a category is a group of its own"
    assert predicted(tenant="a", category="chat", prompt=900) == 50
    assert predicted(prompt=4) == pytest.approx(14 + 0.2 * 36)


def test_no_prediction_exceeds_max_new_tokens() -> None:
    predictor = OutputPredictor()
    predictor.ended(ended(0, 50))
    assert predictor.predict(sequence(1, most=20)) == 20
    predictor.ended(ended(1, 20, FinishReason.LENGTH, most=20))
    assert predictor.counters()["predicted_output_error_tokens"] == 0.0, "its error is that of the capped one"


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR, None])
def test_only_what_ended_by_itself_teaches(reason: FinishReason | None) -> None:
    predictor = OutputPredictor()
    withdrawn = ended(0, 7)
    predictor.predict(withdrawn)
    withdrawn.finish_reason = reason
    predictor.ended(withdrawn)
    assert predictor.predict(sequence(1)) == MOST
    assert set(predictor.counters().values()) == {0.0}


def test_tokens_in_flight_behind_a_stop_do_not_count() -> None:
    predictor = OutputPredictor()
    stopped, simulated = ended(0, 7, tenant="a"), ended(1, 0, FinishReason.LENGTH, tenant="b")
    stopped.num_inflight = 1
    simulated.num_inflight = 9  # simulated outputs stay in flight
    predictor.ended(stopped)
    predictor.ended(simulated)
    assert predictor.predict(sequence(2, tenant="a")) == 7
    assert predictor.predict(sequence(3, tenant="b")) == 9


def test_errors_are_counted_of_what_was_predicted() -> None:
    scheduler = build()
    Engine(scheduler, {0: 10}).serve([sequence(0)])
    assert scheduler.counters() == {
        "predicted_outputs": 0.0, "unpredicted_outputs": 1.0, "predicted_output_error_tokens": 0.0
    }  # fmt: skip
    assert foresight(scheduler.counters()) == {}
    Engine(scheduler, {1: 4, 2: 18}).serve([sequence(1), sequence(2)])
    counters = scheduler.counters()
    assert (counters["predicted_outputs"], counters["predicted_output_error_tokens"]) == (2.0, 6.0 + 8.0)
    metric = summarise([Repeat(wall_s=1.0, requests=[], environment={"counters": counters})])
    assert (metric["output_prediction_error"].value, metric["output_prediction_error"].unit) == (7.0, "tokens")


def test_reset_forgets_and_schedulers_share_nothing() -> None:
    scheduler, other = build(), build()
    for one in (scheduler, other):
        Engine(one, {0: 3}).serve([sequence(0)])
    scheduler.reset()
    assert set(scheduler.counters().values()) == {0.0}
    assert scheduler._predictor.predict(sequence(1)) == MOST
    assert other.counters()["unpredicted_outputs"] == 1.0
    assert other._predictor.predict(sequence(1)) == 3


def test_a_preempted_request_keeps_its_rank_and_counts_once() -> None:
    """Both run out of KV together: the one of the longer prediction gives way, and its whole output counts."""
    scheduler = build(most=4)
    teacher = Engine(scheduler, {0: 6, 1: 20})
    teacher.serve([sequence(0, tenant="terse"), sequence(1, tenant="talks")])
    engine = Engine(scheduler, {2: 20, 3: 6}, CountingSpace(6, 4))
    engine.serve([sequence(2, tenant="talks", most=20), sequence(3, 12, tenant="terse", most=8)])
    assert engine.preemptions == 1
    assert engine.ends_s[3] < engine.ends_s[2]
    counters = scheduler.counters()
    assert (counters["predicted_outputs"], counters["predicted_output_error_tokens"]) == (2.0, 0.0)
    assert not scheduler._predictor._open


def test_the_ageing_bound_holds_with_predicted_lengths() -> None:
    """Overload of short ones for ever: a long one is overtaken only within (n - m) token_s of its arrival."""
    token_s = 0.5
    scheduler = build(ageing_s_per_token=token_s)
    Engine(scheduler, {0: 40, 1: 2}).serve([sequence(0, tenant="talks"), sequence(1, tenant="terse")])
    outputs = dict.fromkeys(range(2, 200), 2) | {6: 40}
    engine = Engine(scheduler, outputs)
    for index in outputs:
        engine.scheduler.add(sequence(index, tenant="talks" if index == 6 else "terse"))
        engine.step()
    arrived = {index: float(place) for place, index in enumerate(outputs)}
    overtakers = [index for index in engine.order[: engine.order.index(6)] if arrived[index] > arrived[6]]
    assert overtakers, "it was overtaken, or this shows nothing"
    assert max(arrived[index] for index in overtakers) <= arrived[6] + (40 - 2) * token_s


def mixed_load(count: int, seed: int) -> tuple[list[Sequence], dict[int, int]]:
    """All may give 64 tokens; how many they give goes by tenant and by length of prompt, give or take a quarter."""
    random, made, outputs = Random(seed), [], {}
    means = {("chat", 4): 4, ("chat", 40): 10, ("write", 4): 24, ("write", 40): 50}
    for seq_id in range(count):
        tenant, prompt = random.choice(list(means))
        made.append(sequence(seq_id, prompt + random.randrange(prompt // 2), tenant=tenant))
        outputs[seq_id] = round(means[tenant, prompt] * random.uniform(0.75, 1.25))
    return made, outputs


def mean_latency(scheduler: Any, seed: int) -> float:
    sequences, outputs = mixed_load(120, seed)
    times = Engine(scheduler, outputs).serve(sequences, every_s=5.0)
    assert len(times) == 120
    return fmean(times)


@pytest.mark.parametrize("seed", range(3))
def test_predicted_lengths_beat_the_order_of_arrival(seed: int) -> None:
    """4 at once, an arrival every 5 s, 22 s of service on average: the load is a little more than can be served."""
    component = SCHEDULERS["continuous"]
    in_order = mean_latency(component.build(component.options(), 4), seed)
    by_limit = mean_latency(build("output", most=4, ageing_s_per_token=10.0), seed)
    predicted = mean_latency(build(most=4, ageing_s_per_token=10.0), seed)
    assert by_limit == pytest.approx(in_order), "max_new_tokens is the same for all, and tells nothing"
    assert predicted < 0.8 * in_order
    assert mean_latency(build(most=4, ageing_s_per_token=10.0), seed) == predicted, "the same every time"
