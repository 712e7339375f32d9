"""The simulated engine: jumps change nothing, histograms say what every token says, replicas share a load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from infermix.engine.simulated.components import SimulatedOptions
from infermix.errors import UserError
from infermix.measure.metrics import repeat_figures
from infermix.measure.repeat import simulate_repeat
from infermix.record.record import Repeat
from infermix.roles.request import Request, SamplingParams
from simulation import SCHEDULERS, load, simulated

OPTIONS: dict[str, Any] = {"batch_size": 8, "max_num_seqs": 8, "max_wait_s": 0.3, "ttft_s": 1.0, "tpot_s": 0.02}


def emissions(repeat: Repeat) -> dict[str, list[float]]:
    return {each.request_id: [time for time, _ in each.emissions] for each in repeat.requests}


@pytest.mark.parametrize("blocks", [9, 1000], ids=["tight", "roomy"])
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_jumping_to_the_next_event_changes_nothing(name: str, blocks: int) -> None:
    """Every token of every request at the same time as when the scheduler is asked at every step."""
    for rate in (1.0, 6.0, 1000.0):
        requests = load(24, rate)
        slow, fast = (simulated(name, blocks=blocks, jump=jump, **OPTIONS) for jump in (False, True))
        stepped, jumped = simulate_repeat(slow, requests, None), simulate_repeat(fast, requests, None)
        expected = emissions(stepped)
        assert emissions(jumped).keys() == expected.keys()
        for request_id, times in emissions(jumped).items():
            assert times == pytest.approx(expected[request_id], abs=1e-6), request_id
        counts = (stepped.environment["counters"], jumped.environment["counters"])
        assert counts[0]["steps"] == counts[1]["steps"]
        assert counts[0]["preemptions"] == counts[1]["preemptions"]
        assert counts[1]["schedules"] <= counts[0]["schedules"]


@pytest.mark.parametrize("blocks", [9, 1000], ids=["tight", "roomy"])
def test_jumps_teach_predictions_the_same(blocks: int) -> None:
    """What ended is known at the same moments: the same order and the same errors, from anew each time."""
    requests, found = load(60, 6.0), []
    for jump, detail in ((False, "tokens"), (True, "tokens"), (True, "requests")):
        engine = simulated("shortest_first", blocks=blocks, jump=jump, detail=detail, length="predicted", **OPTIONS)
        for _ in range(2):
            engine.reset()
            repeat = simulate_repeat(engine, requests, None)
            error = repeat_figures(repeat, {})["output_prediction_error"]
            ends = [each.emissions[-1][0] for each in repeat.requests]
            found.append((error, ends, repeat.environment["counters"]["predicted_outputs"]))
    assert found[0][0] > 0
    for error, ends, count in found[1:]:
        assert (error, count) == (pytest.approx(found[0][0]), found[0][2])
        assert ends == pytest.approx(found[0][1], abs=1e-6)


@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize("detail", ["tokens", "requests"])
def test_jumps_leave_the_same_prefixes_behind(cache: str, detail: str) -> None:
    """Blocks of tokens that come in a jump are held like those that the scheduler asked for."""
    once = load(20, 5.0)
    again = [
        replace(request, request_id=f"again {request.request_id}", arrival_s=request.arrival_s + 60)
        for request in once
    ]
    hits = []
    for jump in (False, True):
        engine = simulated(blocks=200, kv={"prefix_cache": cache}, jump=jump, detail=detail)
        hits.append(repeat_figures(simulate_repeat(engine, [*once, *again], None), {})["prefix_hit_rate"])
    assert hits[0] == hits[1] > 0.2


def test_a_jump_that_ignores_arrivals_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above must be able to fail."""
    from infermix.engine.simulated import replica

    monkeypatch.setattr(replica.Run, "cut", lambda self, time_ns: None)
    with pytest.raises(AssertionError):
        test_jumping_to_the_next_event_changes_nothing("continuous", 1000)


def test_few_plans_are_asked_for_where_little_happens() -> None:
    repeat = simulate_repeat(simulated(), load(20, 0.5), None)
    counters = repeat.environment["counters"]
    assert counters["schedules"] < counters["steps"] / 5


@pytest.mark.parametrize("name", ["continuous", "chunked_prefill", "static"])
def test_histograms_agree_with_the_times_of_every_token(name: str) -> None:
    for blocks in (9, 1000):
        requests = load(30, 8.0)
        each, few = (simulated(name, blocks=blocks, detail=detail, **OPTIONS) for detail in ("tokens", "requests"))
        exact = repeat_figures(simulate_repeat(each, requests, None), {})
        short = simulate_repeat(few, requests, None)
        assert short.gaps is not None
        assert all(len(sample.emissions) <= 2 for sample in short.requests)
        figures = repeat_figures(short, {})
        assert figures.keys() == exact.keys() - {"tokens_per_emission"}
        for key, value in figures.items():
            tolerance = 0.006 if key.startswith("itl_s_p") else 1e-6
            assert value == pytest.approx(exact[key], rel=tolerance), key


def test_limits_on_single_gaps_need_the_times_of_every_token() -> None:
    repeat = simulate_repeat(simulated(detail="requests"), load(5, 1.0), None)
    with pytest.raises(UserError, match="no times between the tokens"):
        repeat_figures(repeat, {"itl_s": 1.0})


def test_an_arrival_waits_for_the_end_of_the_step_it_falls_into() -> None:
    def request(name: str, arrival_s: float) -> Request:
        sampling = SamplingParams(max_new_tokens=50, ignore_eos=True)
        return Request(request_id=name, prompt_ids=(1,) * 10, sampling=sampling, arrival_s=arrival_s)

    repeat = simulate_repeat(simulated(), [request("a", 0.0), request("b", 0.1)], None)
    times = emissions(repeat)
    began = max(time for time in times["a"] if time < times["b"][0])
    assert 0.1 <= began < 0.1 + 0.02
    assert times["b"][0] in times["a"]
    assert all(sample.late_s == 0 for sample in repeat.requests)


def test_a_closed_loop_and_turns_of_a_session_follow_the_ends() -> None:
    repeat = simulate_repeat(simulated(most=2), load(10, 1e9), 2)
    ends = sorted(sample.emissions[-1][0] for sample in repeat.requests)
    arrivals = sorted(sample.arrival_s for sample in repeat.requests)
    assert arrivals[:2] == [0.0, 0.0]
    assert arrivals[2:] == ends[:-2]
    first, second = load(2, 1.0)[:2]
    turns = [first, replace(second, after=first.request_id, think_s=3.0)]
    repeat = simulate_repeat(simulated(), turns, None)
    assert repeat.requests[1].arrival_s == pytest.approx(repeat.requests[0].emissions[-1][0] + 3.0)


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "prefix_affine"])
def test_replicas_share_a_load(router: str) -> None:
    requests = load(200, 1000.0)
    one, four = (simulated(replicas=count, router=router, most=8) for count in (1, 4))
    alone, shared = simulate_repeat(one, requests, None), simulate_repeat(four, requests, None)
    assert shared.wall_s < alone.wall_s / 2
    assert sum(len(sample.emissions) for sample in shared.requests) == sum(
        request.sampling.max_new_tokens for request in requests
    )


def test_prefix_affinity_finds_more_than_round_robin() -> None:
    """Six conversations of five turns on three replicas with a prefix cache each."""
    requests = []
    for session in range(6):
        history: tuple[int, ...] = ()
        for turn in range(5):
            history += tuple(range(1000 * session + 100 * turn, 1000 * session + 100 * turn + 96))
            name, before = f"{session}.{turn}", f"{session}.{turn - 1}" if turn else ""
            sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
            requests.append(
                Request(
                    request_id=name, prompt_ids=history, sampling=sampling, arrival_s=session * 0.7, after=before,
                    think_s=0.1 + 0.01 * session,
                )
            )  # fmt: skip
    hits = {}
    for router in ("round_robin", "prefix_affine"):
        engine = simulated(replicas=3, router=router, kv={"prefix_cache": "radix"})
        repeat = simulate_repeat(engine, requests, None)
        hits[router] = repeat_figures(repeat, {})["prefix_hit_rate"]
    assert hits["prefix_affine"] > 0.6
    assert hits["prefix_affine"] > 1.5 * hits["round_robin"]


def test_requests_that_no_replica_holds_are_refused_and_counted() -> None:
    long = Request(request_id="long", prompt_ids=(1,) * 1000, sampling=SamplingParams(max_new_tokens=100))
    empty = Request(request_id="empty", prompt_ids=())
    repeat = simulate_repeat(simulated(), [long, empty, *load(2, 1.0)], None)
    assert [bool(sample.error) for sample in repeat.requests] == [True, True, False, False]


@pytest.mark.parametrize(
    "option", [{"overhead_s": 1e300}, {"efficiency": 1e-300}, {"bytes_per_s": 1e-300}, {"flops_per_s": 1e-300}]
)
def test_steps_end_within_a_time_that_there_is(option: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(option, SimulatedOptions)
