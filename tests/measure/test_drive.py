from __future__ import annotations

import pytest
from infermix.errors import InfermixError
from infermix.measure import drive as drive_module
from infermix.measure.drive import drive
from infermix.measure.goodput import e2e_s, ttft_from_send_s, ttft_s
from infermix.roles.request import FinishReason, Request, SamplingParams, TokenEvent


def requests(*arrivals: float, tokens: int = 1) -> list[Request]:
    sampling = SamplingParams(max_new_tokens=tokens)
    return [
        Request(request_id=str(index), prompt_ids=(1, 2, 3), sampling=sampling, arrival_s=arrival)
        for index, arrival in enumerate(arrivals)
    ]


def by_id(repeat):
    return {sample.request_id: sample for sample in repeat.requests}


def test_latency_counts_from_the_intended_arrival(clock, make_engine) -> None:
    """One step hangs for 10 s. A generator that waits for it hides nine slow requests; ours must show them."""
    engine = make_engine(step_s=0.01, step_times={0: 10.0}, max_num_seqs=1)
    repeat = drive(engine, requests(*range(10)), None, clock=clock)
    samples = by_id(repeat)
    assert ttft_s(samples["0"]) == pytest.approx(10.0)
    for index in range(1, 10):
        assert samples[str(index)].arrival_s == pytest.approx(index)
        assert samples[str(index)].sent_s == pytest.approx(10.0)
        assert ttft_s(samples[str(index)]) == pytest.approx(10 - index + 0.01 * index)
        assert ttft_from_send_s(samples[str(index)]) == pytest.approx(0.01 * index)


def test_a_long_step_does_not_make_the_generator_late(clock, make_engine) -> None:
    engine = make_engine(step_s=0.5, submit_s=0.02)
    repeat = drive(engine, requests(0.0, 0.1, 0.2, 0.3), None, clock=clock)
    assert by_id(repeat)["3"].sent_s == pytest.approx(0.52 + 0.04)
    assert repeat.generator_late_s == 0.0


def test_oversleeping_makes_the_generator_late(clock, make_engine) -> None:
    clock.drag_s = 0.03
    repeat = drive(make_engine(), requests(0.0, 1.0, 2.0), None, clock=clock)
    assert [sample.late_s for sample in repeat.requests] == pytest.approx([0.0, 0.03, 0.03])
    assert repeat.generator_late_s == pytest.approx(0.03)


def test_it_sleeps_only_while_the_engine_is_idle(clock, make_engine) -> None:
    engine = make_engine(step_s=0.1)
    repeat = drive(engine, requests(0.0, 0.35, 2.0, tokens=3), None, clock=clock)
    # busy 0..0.3, idle to 0.35, busy to 0.65, idle to 2.0, busy to 2.3
    assert clock.slept_s == pytest.approx(0.05 + 1.35)
    assert (repeat.steps, repeat.wall_s) == (9, pytest.approx(2.3))


def test_a_first_arrival_after_the_start_counts_from_the_start(clock, make_engine) -> None:
    repeat = drive(make_engine(), requests(1.0), None, clock=clock)
    assert repeat.wall_s == pytest.approx(1.01)
    assert ttft_s(repeat.requests[0]) == pytest.approx(0.01)


def test_open_loop_orders_by_arrival(clock, make_engine) -> None:
    repeat = drive(make_engine(), requests(2.0, 1.0, 0.0), None, clock=clock)
    assert [sample.request_id for sample in repeat.requests] == ["2", "1", "0"]


def test_everything_at_once(clock, make_engine) -> None:
    engine = make_engine(max_num_seqs=3)
    repeat = drive(engine, requests(*[0.0] * 7, tokens=2), None, clock=clock)
    assert (engine.most_running, repeat.steps) == (3, 6)
    assert [sample.sent_s for sample in repeat.requests] == [0.0] * 7
    assert e2e_s(by_id(repeat)["6"]) == pytest.approx(0.06)


def test_closed_loop_keeps_the_asked_number_in_flight(clock, make_engine) -> None:
    engine = make_engine(step_s=0.1, max_num_seqs=100)
    repeat = drive(engine, requests(*[99.0] * 5, tokens=2), 2, clock=clock)
    assert engine.most_running == 2
    arrivals = [sample.arrival_s for sample in repeat.requests]
    assert arrivals == pytest.approx([0.0, 0.0, 0.2, 0.2, 0.4])
    assert clock.slept_s == 0
    assert repeat.generator_late_s == 0.0


def test_a_closed_loop_turn_begins_when_the_event_was_received(clock, make_engine) -> None:
    """The engine goes on for 30 ms after it read the last token: that is queueing of the next request."""
    engine = make_engine(step_s=0.1)
    step = engine.step

    def step_and_linger() -> list[TokenEvent]:
        events = step()
        clock.advance(0.03)
        return events

    engine.step = step_and_linger
    second = drive(engine, requests(0, 0), 1, clock=clock).requests[1]
    assert second.arrival_s == pytest.approx(0.1)
    assert second.sent_s == pytest.approx(0.13)
    assert second.late_s == 0.0
    assert ttft_s(second) == pytest.approx(0.13)


def test_bursts_are_kept_as_emissions(clock, make_engine) -> None:
    repeat = drive(make_engine(burst=3, step_s=0.1), requests(0.0, tokens=7), None, clock=clock)
    assert repeat.requests[0].emissions == [
        (pytest.approx(0.1), 3),
        (pytest.approx(0.2), 3),
        (pytest.approx(0.3), 1),
    ]


def test_outputs_are_kept_for_the_first_few(clock, make_engine) -> None:
    repeat = drive(make_engine(), requests(0.0, 0.0, tokens=4), None, clock=clock, keep_outputs=1)
    assert [sample.output_ids for sample in repeat.requests] == [[0, 1, 2, 3], []]


@pytest.mark.parametrize("concurrency", [None, 1, 2])
def test_failures_are_recorded_and_the_rest_goes_on(clock, make_engine, concurrency) -> None:
    engine = make_engine(refused=frozenset("02"), broken=frozenset("1"))
    repeat = drive(engine, requests(*[0.0] * 5, tokens=2), concurrency, clock=clock)
    assert [sample.finish_reason for sample in repeat.requests] == ["error", "error", "error", "length", "length"]
    assert "longer than the model" in by_id(repeat)["0"].error
    assert by_id(repeat)["0"].emissions == []
    assert len(by_id(repeat)["1"].emissions) == 1


def test_all_refused(clock, make_engine) -> None:
    repeat = drive(make_engine(refused=frozenset("01")), requests(0.0, 1.0), None, clock=clock)
    assert [sample.finish_reason for sample in repeat.requests] == ["error", "error"]


def test_no_requests(clock, make_engine) -> None:
    assert drive(make_engine(), [], None, clock=clock).requests == []


def test_a_long_silent_prefill_is_no_stall(clock, make_engine, monkeypatch) -> None:
    monkeypatch.setattr(drive_module, "STALL_STEPS", 10)
    request = Request(request_id="0", prompt_ids=(1,) * 500, sampling=SamplingParams(max_new_tokens=1))
    repeat = drive(make_engine(step_s=1.0, silent_steps=500), [request], None, clock=clock)
    assert repeat.steps == 501


def test_a_stalled_engine_is_an_error(clock, make_engine) -> None:
    engine = make_engine(step_s=0.1, silent_steps=10**9)
    with pytest.raises(InfermixError, match="no progress for 1004 steps and 100 s with 1 requests"):
        drive(engine, requests(0.0), None, clock=clock)


def test_an_engine_that_forgets_a_request_is_an_error(clock, make_engine) -> None:
    engine = make_engine()
    engine.step = lambda: engine.reset() or []
    with pytest.raises(InfermixError, match="idle, but 2 requests have not ended, among them '0'"):
        drive(engine, requests(0.0, 0.0), None, clock=clock)


@pytest.mark.parametrize(("name", "state"), [("ghost", "never submitted"), ("0", "already ended")])
def test_an_event_of_a_request_that_does_not_run_is_an_error(clock, make_engine, name, state) -> None:
    engine = make_engine()
    step = engine.step
    engine.step = lambda: [*step(), TokenEvent(name, (1,), clock.now_ns(), FinishReason.LENGTH)]
    with pytest.raises(InfermixError, match=f"{name!r}, which was {state}"):
        drive(engine, requests(0.0), None, clock=clock)


def test_identifiers_must_differ(clock, make_engine) -> None:
    with pytest.raises(InfermixError, match="same request_id"):
        drive(make_engine(), requests(0.0) * 2, None, clock=clock)


def test_concurrency_must_be_positive(clock, make_engine) -> None:
    with pytest.raises(InfermixError, match="at least 1"):
        drive(make_engine(), requests(0.0), 0, clock=clock)


def turn(name: str, after: str = "", think_s: float = 0.0, arrival_s: float = 0.0) -> Request:
    return Request(request_id=name, prompt_ids=(1, 2), sampling=SamplingParams(max_new_tokens=2), after=after,
                   think_s=think_s, arrival_s=arrival_s)  # fmt: skip


def test_the_next_turn_arrives_after_the_answer_and_the_thinking(clock, make_engine) -> None:
    session = [turn("a"), turn("b", "a", 1.0), turn("c", "b", 0.5), turn("x", arrival_s=1.1)]
    repeat = drive(make_engine(step_s=0.1), session, None, clock=clock, keep_outputs=4)
    samples = by_id(repeat)
    assert {name: round(sample.arrival_s, 6) for name, sample in samples.items()} == {
        "a": 0.0, "x": 1.1, "b": 1.2, "c": 1.9,
    }  # fmt: skip
    assert ttft_s(samples["b"]) == pytest.approx(0.1)
    assert all(sample.output_ids for sample in repeat.requests)
    assert repeat.generator_late_s == 0.0


def test_sessions_whose_answers_end_together(clock, make_engine) -> None:
    sessions = [turn("a0"), turn("b0"), turn("a1", "a0", 0.5), turn("b1", "b0", 0.5)]
    samples = by_id(drive(make_engine(step_s=0.1), sessions, None, clock=clock))
    assert {name: round(sample.arrival_s, 6) for name, sample in samples.items()} == {
        "a0": 0.0, "b0": 0.0, "a1": 0.7, "b1": 0.7,
    }  # fmt: skip


def test_a_thinking_session_keeps_its_place(clock, make_engine) -> None:
    sessions = [turn("a"), turn("b", "a", 1.0), turn("x"), turn("y", "x")]
    engine = make_engine(step_s=0.1)
    samples = by_id(drive(engine, sessions, 1, clock=clock))
    arrivals = {name: round(sample.arrival_s, 6) for name, sample in samples.items()}
    assert arrivals == {"a": 0.0, "b": 1.2, "x": 1.4, "y": 1.6}
    assert engine.most_running == 1


def test_turns_behind_a_failed_one_fail_with_it(clock, make_engine) -> None:
    session = [turn("a"), turn("b", "a", 1.0), turn("c", "b"), turn("x")]
    repeat = drive(make_engine(refused=frozenset({"a"})), session, None, clock=clock)
    samples = by_id(repeat)
    assert samples["x"].finish_reason == "length"
    for name in ("b", "c"):
        assert samples[name].finish_reason == "error"
        assert samples[name].error == "not sent: request 'a', an earlier turn of its session, failed"


@pytest.mark.parametrize(
    ("session", "fault"),
    [
        ([turn("a"), turn("b", "z")], "request 'b' follows one that is not there"),
        ([turn("a"), turn("b", "c"), turn("c", "b")], "request 'b' follows one that is not there"),
        ([turn("a"), turn("b", "a"), turn("c", "a")], "two requests follow the same one"),
    ],
)
def test_turns_that_never_come_are_refused(clock, make_engine, session, fault: str) -> None:
    with pytest.raises(InfermixError, match=fault):
        drive(make_engine(), session, None, clock=clock)
