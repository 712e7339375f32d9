from __future__ import annotations

import json
import os
import subprocess
import sys

import msgspec
import pytest
from infermix.measure.guards import Evidence, run_guards
from infermix.measure.nvml import count_others
from infermix.measure.repeat import compare_lengths, measure_repeat, shareable_tokens
from infermix.measure.surroundings import Watch, usable_cores
from infermix.record.record import Repeat, RequestSample
from infermix.roles.request import Request, SamplingParams


def request(name: str, prompt: tuple[int, ...] = (1, 2), **sampling) -> Request:
    return Request(request_id=name, prompt_ids=prompt, sampling=SamplingParams(**{"max_new_tokens": 3, **sampling}))


def test_a_repeat_carries_what_the_guards_read(clock, make_engine) -> None:
    engine = make_engine(counters={"compiles": 7.0})
    step = engine.step

    def compiling_step():
        engine.counters["compiles"] += 1
        engine.counters["autotunes"] = 1.0
        return step()

    engine.step = compiling_step
    repeat = measure_repeat(engine, [request("0"), request("1", (1, 3, 4))], None, clock=clock, input_tokens=(2, 2))
    assert repeat.environment["counters"] == {"compiles": 3.0, "autotunes": 1.0}
    assert (repeat.environment["inputs_off"], repeat.environment["outputs_off"]) == (1, 0)
    assert repeat.environment["shareable_tokens"] == 1
    stored = msgspec.convert(json.loads(msgspec.json.encode(repeat)), Repeat)
    red = {r.name for r in run_guards(Evidence(repeats=[stored])) if r.verdict == "red"}
    assert {"setup_in_window", "input_length"} <= red


def sample(name: str, tokens: int, input_tokens: int = 2, reason: str = "length") -> RequestSample:
    return RequestSample(
        request_id=name,
        arrival_s=0,
        sent_s=0,
        input_tokens=input_tokens,
        emissions=[(1.0, tokens)],
        finish_reason=reason,
    )


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "off"),
    [
        ({"ignore_eos": True}, 3, "length", 0),
        ({"ignore_eos": True}, 2, "stop", 1),
        ({"ignore_eos": True}, 2, "error", 0),  # a failure is another guard's business
        ({"ignore_eos": True, "stop": ("x",)}, 2, "stop", 0),
        ({"ignore_eos": True, "stop_token_ids": (5,)}, 2, "stop", 0),
        ({}, 2, "stop", 0),
        ({}, 4, "length", 1),
    ],
)
def test_output_lengths(sampling, tokens, reason, off) -> None:
    found = compare_lengths([sample("0", tokens, reason=reason)], [request("0", **sampling)])
    assert found == {"inputs_off": 0, "outputs_off": off}


def test_input_lengths() -> None:
    requests = [request("0"), request("1"), request("2", (1, 2, 3))]
    samples = [sample("0", 3), sample("1", 3, input_tokens=1), sample("2", 3, input_tokens=3)]
    assert compare_lengths(samples, requests)["inputs_off"] == 1
    assert compare_lengths(samples, requests, (2, 2))["inputs_off"] == 2


def test_shareable_tokens() -> None:
    prompts = [(1, 2, 3), (9, 9), (1, 2, 4, 5), (1, 2, 3)]
    # sorted: 123, 123, 1245, 99: the second shares 3, the third 2, the last none
    assert shareable_tokens([request(str(i), prompt) for i, prompt in enumerate(prompts)]) == 5
    assert shareable_tokens([]) == 0


def test_watch_sees_our_own_work() -> None:
    watch = Watch("cpu")
    total = 0
    for value in range(2_000_000):
        total += value
    seen = watch.finish()
    assert seen["num_cores"] == usable_cores()
    assert seen["swap_bytes"] >= 0
    assert "other_processes" not in seen
    if "cpu_run_s" in seen:
        assert seen["cpu_run_s"] > 0.005
        assert 0 <= seen["cpu_wait_share"] <= 1


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel does not count waiting")
def test_watch_sees_that_threads_compete_for_a_core() -> None:
    """Two busy processes pinned to one core: each waits about half of the time."""
    busy = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    watcher = (
        "import os, json; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from infermix.measure.surroundings import Watch\n"
        "watch = Watch('cpu')\n"
        "for _ in range(6_000_000): pass\n"
        "print(json.dumps(watch.finish()))"
    )
    rival = subprocess.Popen([sys.executable, "-c", busy])
    try:
        done = subprocess.run([sys.executable, "-c", watcher], capture_output=True, text=True, check=True)
    finally:
        rival.kill()
        rival.wait()
    assert json.loads(done.stdout)["cpu_wait_share"] > 0.15


def test_watch_says_why_it_could_not_read_the_device() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert Watch("cuda").finish()["nvml_error"]
    else:
        pynvml.nvmlShutdown()
        pytest.skip("there is a device")


@pytest.mark.parametrize(
    ("pids", "own", "others"),
    [
        ([], {1}, 0),
        ([1], {1}, 0),
        ([1, 2], {1}, 1),
        ([1, 2, 3], {1, 2}, 1),
        ([77], {1}, 0),  # a container: host ids, one of them is ours
        ([77, 78], {1}, 1),
    ],
)
def test_company_on_the_device(pids, own, others) -> None:
    assert count_others(pids, own) == others
