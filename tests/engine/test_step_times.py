"""What schedulers are told about steps, and plans that wait on purpose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from infermix.engine.step_times import StepTimes
from infermix.errors import InfermixError
from infermix.roles.request import Request, SamplingParams
from infermix.roles.scheduler import Plan


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_a_step_counts_from_its_launch_or_from_the_end_of_the_one_before() -> None:
    clock, seen = Clock(), []
    times = StepTimes(SimpleNamespace(observe=lambda step_s, plan: seen.append((step_s, plan))), clock)  # type: ignore[arg-type]
    plans = [Plan(valid_steps=number) for number in (1, 2, 3)]
    for at, event in ((0, 0), (2, 1), (10, None), (12, None), (20, 2), (25, None)):
        clock.now = at * 10**9
        times.collected() if event is None else times.launched(plans[event])
    assert seen == [(10.0, plans[0]), (2.0, plans[1]), (5.0, plans[2])]


def test_schedulers_that_do_not_observe_cost_nothing() -> None:
    times = StepTimes(object(), lambda: pytest.fail("the clock was read"))  # type: ignore[arg-type]
    times.launched(Plan())
    times.collected()


def _run(engine: Any, count: int) -> tuple[dict[str, int], int]:
    tokens, silent = {}, 0
    for index in range(count):
        sampling = SamplingParams(max_new_tokens=5, ignore_eos=True)
        engine.submit(Request(request_id=str(index), prompt_ids=(7, 8, 9 + index), sampling=sampling))
    while engine.has_work:
        events = engine.step()
        silent += not events
        for event in events:
            tokens[event.request_id] = tokens.get(event.request_id, 0) + len(event.token_ids)
    return tokens, silent


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_the_engine_tells_every_step_and_waits_with_the_scheduler(build_engine: Any, overlap: str) -> None:
    engine = build_engine(
        {"scheduler": ("dynamic", {"batch_size": 4, "max_wait_s": 0.05})}, engine={"overlap": overlap}
    )
    tokens, silent = _run(engine, 3)
    assert tokens == dict.fromkeys("012", 5)
    assert silent > 3, "three of four requests wait for the fourth"
    assert engine.report().counters["steps"] <= 6, "polls while it waits are no steps"
    engine.close()
    engine = build_engine({"scheduler": "slo_aware"}, engine={"overlap": overlap})
    assert _run(engine, 3)[0] == dict.fromkeys("012", 5)
    observed = engine._scheduler._model._steps
    assert len(observed) == 5, "one prefill, four decodes; a step of overlap that only reads tokens is none"
    assert all(step[-1] > 0 for step in observed)
    assert observed[0][1:3] == (3.0, 9.0), "three prompts of three tokens"


def test_an_empty_plan_that_does_not_say_so_is_still_a_stall(build_engine: Any) -> None:
    engine = build_engine({"scheduler": "dynamic"})
    engine._scheduler = SimpleNamespace(
        add=lambda seq: None,
        finish=lambda seq: None,
        schedule=lambda space, now_s: Plan(),
        num_waiting=1,
        num_running=0,
    )
    engine.submit(Request(request_id="a", prompt_ids=(7,), sampling=SamplingParams(max_new_tokens=2)))
    with pytest.raises(InfermixError, match="runs nothing although 1 wait"):
        engine.step()
