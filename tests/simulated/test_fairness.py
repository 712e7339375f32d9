"""The lowest class under overload: its wait is bounded by the stated formula, and only because of the ageing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from infermix.measure.metrics import repeat_figures
from infermix.measure.repeat import simulate_repeat
from infermix.record.record import Repeat
from infermix.roles.request import Request, SamplingParams
from simulation import simulated

PROMPT, OUTPUT, MOST = 20, 20, 8
URGENT_RATE, LOWEST_EVERY_S = 60.0, 2.0


def overload(seconds: float, seed: int = 0) -> Sequence[Request]:
    """Urgent requests at more than the engine can serve, and now and then one of the lowest class (2)."""
    random, now_s, times = Random(seed), 0.0, []
    while now_s < seconds:
        times.append((now_s, 0))
        now_s += random.expovariate(URGENT_RATE)
    times += [(LOWEST_EVERY_S * index + 0.5, 2) for index in range(int(seconds / LOWEST_EVERY_S))]
    return [
        Request(
            request_id=f"{'low' if level else 'high'}{index}",
            prompt_ids=(1,) * PROMPT,
            sampling=SamplingParams(max_new_tokens=OUTPUT, ignore_eos=True),
            arrival_s=arrival_s,
            priority=level,
            category="low" if level else "high",
        )
        for index, (arrival_s, level) in enumerate(sorted(times))
    ]


def waits(repeat: Repeat, category: str) -> list[float]:
    return [s.emissions[0][0] - s.arrival_s for s in repeat.requests if s.category == category]


def bound_s(repeat: Repeat, requests: Sequence[Request], low: Request, ageing_s: float) -> float:
    """Of the docstring of `ageing.priority_queue`, in requests: mu is what this run served per second."""
    started = {s.request_id: s.emissions[0][0] for s in repeat.requests}
    ended = {s.request_id: s.emissions[-1][0] for s in repeat.requests}
    served_per_s = len(requests) / repeat.wall_s
    ahead = sum(1 for each in requests if each.arrival_s <= low.arrival_s < ended[each.request_id])
    later = sum(
        1 for each in requests if each.priority < 2 and low.arrival_s < each.arrival_s < low.arrival_s + 2 * ageing_s
    )
    longest_run_s = max(ended[each.request_id] - started[each.request_id] for each in requests)
    return (ahead + later) / served_per_s + 2 * longest_run_s


@pytest.mark.parametrize("ageing_s", [0.5, 2.0])
def test_the_wait_of_the_lowest_class_is_bounded_while_the_overload_lasts(ageing_s: float) -> None:
    requests = overload(20.0)
    repeat = simulate_repeat(simulated("priority", most=MOST, max_num_seqs=MOST, ageing_s=ageing_s), requests, None)
    assert repeat.wall_s > 1.3 * 20.0, "this is no overload"
    started = {s.request_id: s.emissions[0][0] for s in repeat.requests}
    for low in (each for each in requests if each.priority == 2):
        assert started[low.request_id] - low.arrival_s <= bound_s(repeat, requests, low, ageing_s)


def test_without_ageing_the_lowest_class_waits_for_the_end_of_the_overload() -> None:
    """The mutant: strict priority breaks the bound that ageing of two seconds keeps."""
    requests = overload(20.0)
    repeat = simulate_repeat(simulated("priority", most=MOST, max_num_seqs=MOST, ageing_s=1e6), requests, None)
    first = next(each for each in requests if each.priority == 2)
    started = {s.request_id: s.emissions[0][0] for s in repeat.requests}
    assert started[first.request_id] - first.arrival_s > bound_s(repeat, requests, first, 2.0)
    assert max(waits(repeat, "low")) > 20.0


def test_urgent_requests_still_wait_less() -> None:
    requests = overload(10.0)
    figures = repeat_figures(
        simulate_repeat(simulated("priority", most=MOST, max_num_seqs=MOST, ageing_s=4.0), requests, None), {}
    )
    assert figures["ttft_s_p50[high]"] < figures["ttft_s_p50[low]"] <= figures["ttft_s_max[low]"]


def test_fair_share_bounds_what_a_flood_does_to_a_small_tenant() -> None:
    """One request a second beside a flood: it waits for one request of the flood at most, not for its queue."""
    flood = [
        Request(request_id=f"f{i}", prompt_ids=(1,) * PROMPT, sampling=SamplingParams(max_new_tokens=OUTPUT),
                arrival_s=i / 100, tenant="flood")
        for i in range(800)
    ]  # fmt: skip
    small = [
        Request(request_id=f"s{i}", prompt_ids=(1,) * PROMPT, sampling=SamplingParams(max_new_tokens=OUTPUT),
                arrival_s=0.5 + i, tenant="small")
        for i in range(8)
    ]  # fmt: skip
    worst = {}
    for name in ("fair_share", "continuous"):
        repeat = simulate_repeat(simulated(name, most=MOST, max_num_seqs=MOST), [*flood, *small], None)
        figures = repeat_figures(repeat, {})
        worst[name] = figures["ttft_s_max[tenant:small]"]
        run_s = max(s.emissions[-1][0] - s.emissions[0][0] for s in repeat.requests)
        if name == "fair_share":
            assert worst[name] <= 2 * run_s
    assert worst["continuous"] > 5 * worst["fair_share"]
