"""Every guard both ways: quiet when all is well, loud when it is not."""

from __future__ import annotations

from typing import Any

import pytest
from infermix.errors import UserError
from infermix.measure.guards import GUARD_LIMITS, GUARDS, Evidence, check_guard_names, run_guards
from infermix.record.record import Repeat, RequestSample

QUIET: dict[str, Any] = {
    "load_average": 0.5,
    "num_cores": 2,
    "cpu_run_s": 1.0,
    "cpu_wait_share": 0.001,
    "swap_bytes": 0,
    "thermal_events": 0,
    "counters": {"steps": 10.0, "compiles": 0.0, "prefix_hit_tokens": 0.0},
    "inputs_off": 0,
    "outputs_off": 0,
    "shareable_tokens": 0,
}
QUIET_CUDA: dict[str, Any] = {**QUIET, "throttled_share": {"thermal": 0.0, "power": 0.0}, "other_processes": 0}


def repeat(
    *, wall_s: float = 10.0, late_s: float = 0.0, failed: int = 0, gap_s: float = 1.0, **environment
) -> Repeat:
    samples = [
        RequestSample(
            request_id=str(index),
            arrival_s=index * gap_s,
            sent_s=index * gap_s,
            input_tokens=10,
            emissions=[(index * gap_s + wall_s / 10, 5)],
            finish_reason="error" if index < failed else "length",
            late_s=late_s,
        )
        for index in range(10)
    ]
    return Repeat(wall_s=wall_s, requests=samples, environment={**QUIET, **environment})


def verdicts(*repeats: Repeat, limits=None, **evidence) -> dict[str, str]:
    results = run_guards(Evidence(repeats=repeats, **evidence), limits)
    assert all(result.detail for result in results)
    return {result.name: result.verdict for result in results}


def three(**changes) -> list[Repeat]:
    return [repeat(), repeat(**changes), repeat()]


def test_all_is_green_on_a_quiet_machine() -> None:
    found = verdicts(*three(), steady=True)
    assert set(found.values()) == {"green"}
    assert set(found) == set(GUARD_LIMITS) - {"power_throttle", "device_shared"}


def test_all_is_green_on_a_quiet_device() -> None:
    found = verdicts(*[repeat(**QUIET_CUDA)] * 3, device="cuda", steady=True)
    assert set(found.values()) == {"green"}
    assert set(found) == set(GUARD_LIMITS) - {"load_average"}


@pytest.mark.parametrize(
    ("guard", "changes", "verdict"),
    [
        ("setup_in_window", {"counters": {"compiles": 1.0}}, "red"),
        ("setup_in_window", {"counters": {"autotunes": 2.0}}, "red"),
        ("setup_in_window", {"counters": {"graph_captures": 1.0}}, "red"),
        ("prefix_hits", {"counters": {"prefix_hit_tokens": 64.0}}, "red"),
        ("prefix_hits", {"counters": {"prefix_hit_tokens": 64.0}, "shareable_tokens": 64}, "green"),
        ("prefix_hits", {"counters": {"prefix_hit_tokens": 64.0, "prefix_kept_tokens": 64.0}}, "yellow"),
        ("prefix_hits", {"counters": {"prefix_hit_tokens": 65.0, "prefix_kept_tokens": 64.0}}, "red"),
        ("input_length", {"inputs_off": 1}, "red"),
        ("output_length", {"outputs_off": 1}, "red"),
        ("failed_share", {"failed": 1}, "red"),
        ("generator_late", {"late_s": 0.009}, "green"),
        ("generator_late", {"late_s": 0.02}, "yellow"),
        ("generator_late", {"late_s": 0.2}, "red"),
        ("generator_late_gap", {"late_s": 0.009, "gap_s": 0.05}, "yellow"),
        ("generator_late_gap", {"late_s": 0.009, "gap_s": 0.01}, "red"),
        ("cpu_wait", {"cpu_wait_share": 0.1}, "yellow"),
        ("cpu_wait", {"cpu_wait_share": 0.4}, "red"),
        ("load_average", {"load_average": 3.0}, "yellow"),
        ("load_average", {"load_average": 9.0}, "red"),
        ("swap", {"swap_bytes": 2**22}, "yellow"),
        ("swap", {"swap_bytes": 2**30}, "red"),
        ("thermal_throttle", {"thermal_events": 1}, "yellow"),
    ],
)
def test_one_bad_repeat_is_enough(guard: str, changes: dict, verdict: str) -> None:
    found = verdicts(*three(**changes))
    assert found.pop(guard) == verdict
    if verdict != "green" and guard != "generator_late":
        assert set(found.values()) == {"green"}


@pytest.mark.parametrize(
    ("guard", "changes", "verdict"),
    [
        ("thermal_throttle", {"throttled_share": {"thermal": 0.03, "power": 0.0}}, "yellow"),
        ("thermal_throttle", {"throttled_share": {"thermal": 0.3, "power": 0.0}}, "red"),
        ("power_throttle", {"throttled_share": {"thermal": 0.0, "power": 0.9}}, "yellow"),
        ("device_shared", {"other_processes": 1}, "red"),
    ],
)
def test_the_device(guard: str, changes: dict, verdict: str) -> None:
    repeats = [repeat(**QUIET_CUDA), repeat(**{**QUIET_CUDA, **changes}), repeat(**QUIET_CUDA)]
    found = verdicts(*repeats, device="cuda")
    assert found.pop(guard) == verdict
    assert set(found.values()) == {"green"}


def test_a_device_that_cannot_be_read_is_yellow() -> None:
    repeats = [repeat(nvml_error="Driver Not Loaded")] * 3
    (result,) = [r for r in run_guards(Evidence(repeats=repeats, device="cuda")) if r.name == "device_shared"]
    assert (result.verdict, result.detail) == ("yellow", "could not be checked: Driver Not Loaded")


def test_a_rare_failure_is_yellow_and_named() -> None:
    samples = [sample for index in range(20) for sample in repeat(failed=index == 0).requests]
    samples[0].error = "the prompt is empty"
    result = next(
        r for r in run_guards(Evidence(repeats=[Repeat(wall_s=1, requests=samples)])) if r.name == "failed_share"
    )
    assert (result.verdict, result.value) == ("yellow", 0.005)
    assert "1 of 200 requests failed, the first: the prompt is empty" in result.detail


def test_few_repeats() -> None:
    assert verdicts(repeat(), repeat())["few_repeats"] == "yellow"
    assert verdicts(repeat(), repeat(), limits={"few_repeats": 2})["few_repeats"] == "green"


def test_unsteady_warmup() -> None:
    assert verdicts(*three(), steady=False)["unsteady"] == "yellow"
    assert "unsteady" not in verdicts(*three(), steady=None)


@pytest.mark.parametrize("concurrency", [None, 4])
@pytest.mark.parametrize(
    ("walls", "verdict"),
    [
        ([10.0, 10.9, 12.0, 13.1], "red"),
        ([10.0, 10.3, 10.61, 10.9], "yellow"),
        ([10.0, 10.1, 10.2, 10.3], "green"),  # certain, but small
        ([10.0, 14.0, 9.0, 12.0], "green"),  # large, but no trend
    ],
)
def test_drift(walls: list[float], verdict: str, concurrency: int | None) -> None:
    found = verdicts(*[repeat(wall_s=wall) for wall in walls], concurrency=concurrency)
    assert found["rate_drift"] == verdict


def test_a_closed_loop_has_no_gaps() -> None:
    assert "generator_late_gap" not in verdicts(*three(late_s=0.5), concurrency=2)


def test_there_is_no_schedule_when_everything_arrives_at_once() -> None:
    at_once = [repeat(late_s=0.5, gap_s=0.0)] * 3
    assert not {"generator_late", "generator_late_gap"} & set(verdicts(*at_once))
    assert verdicts(*at_once, concurrency=10)["generator_late"] == "red"


def test_limits_can_be_set() -> None:
    noisy = three(cpu_wait_share=0.3)
    assert verdicts(*noisy)["cpu_wait"] == "red"
    assert verdicts(*noisy, limits={"cpu_wait": 0.5})["cpu_wait"] == "green"


def test_an_unknown_guard_is_refused() -> None:
    with pytest.raises(UserError, match=r"measure.guards.cpu_wit: .*did you mean 'cpu_wait'"):
        run_guards(Evidence(repeats=[]), {"cpu_wit": 1.0})
    check_guard_names(GUARD_LIMITS)


def test_guards_are_documented_and_results_carry_value_and_limit() -> None:
    assert all(guard.doc for guard in GUARDS)
    for result in run_guards(Evidence(repeats=three(), steady=True)):
        assert result.limit == GUARD_LIMITS[result.name].limit
        assert result.value is not None


def test_no_repeats() -> None:
    assert verdicts() == {"setup_in_window": "green", "prefix_hits": "green", "few_repeats": "yellow"}
