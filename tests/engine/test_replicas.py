"""Several native engines behind a router: the same tokens as one, KV of their own, weights once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from infermix.engine.components import NativeOptions
from infermix.engine.simulated.components import SimulatedOptions
from infermix.errors import UserError
from infermix.measure.drive import drive
from infermix.roles.request import Request, SamplingParams
from infermix.toolkit.routing import LeastLoaded, PrefixAffine, RoundRobin

Build = Callable[..., Any]


def requests(count: int = 9, **sampling: Any) -> list[Request]:
    return [
        Request(
            request_id=str(index),
            prompt_ids=tuple((7 * index + place) % 90 + 6 for place in range(3 + 5 * (index % 4))),
            sampling=SamplingParams(max_new_tokens=4 + index % 5, ignore_eos=True, seed=index, **sampling),
        )
        for index in range(count)
    ]


def outputs(engine: Any, asked: list[Request]) -> dict[str, list[int]]:
    repeat = drive(engine, asked, None, keep_outputs=len(asked))
    return {sample.request_id: sample.output_ids for sample in repeat.requests}


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "prefix_affine"])
@pytest.mark.parametrize("kv", [("paged", {"prefix_cache": "radix"}), "dense"], ids=["radix", "dense"])
def test_replicas_give_the_tokens_of_one_engine(build_engine: Build, router: str, kv: Any) -> None:
    asked = requests(temperature=0.8)
    alone = outputs(build_engine({"kv": kv}), asked)
    engine = build_engine({"kv": kv}, {"replicas": 3, "router": router, "overlap": "on"})
    assert outputs(engine, asked) == alone
    engine.reset()
    assert outputs(engine, asked) == alone


def test_weights_are_loaded_once_and_kv_is_there_for_each(build_engine: Build) -> None:
    one, three = build_engine(), build_engine(engine={"replicas": 3})
    assert three.report().weight_bytes == one.report().weight_bytes
    assert three.report().kv_bytes == 3 * one.report().kv_bytes
    assert three.report().executed["engine"]["replicas"] == 3
    outputs(three, requests())
    assert three.report().counters["steps"] > 3


def test_stated_memory_is_shared_out(build_engine: Build) -> None:
    one = build_engine(kv_memory_bytes=600_000)
    three = build_engine(engine={"replicas": 3}, kv_memory_bytes=600_000)
    assert max(one.report().kv_bytes, three.report().kv_bytes) <= 600_000


def test_stated_host_memory_is_shared_out(build_engine: Build) -> None:
    parts = {"scheduler": ("continuous", {"preemption": "swap"})}
    one, three = (
        build_engine(parts, {"replicas": count} if count > 1 else {}, kv_memory_bytes=600_000, kv_swap_bytes=90_000)
        for count in (1, 3)
    )
    (blocks,), (each,) = (engine.report().executed["engine"]["swap_host_blocks"] for engine in (one, three))
    assert each == blocks // 3 > 0
    assert 0 < three.report().executed["engine"]["swap_host_bytes"] <= 90_000


def test_a_replica_without_its_own_kv_would_be_noticed(build_engine: Build) -> None:
    """The mutant: all replicas use the KV of the last one."""
    asked = requests()
    alone = outputs(build_engine(), asked)
    engine = build_engine(engine={"replicas": 3})
    engine._attach = [engine._attach[-1]] * 3
    assert outputs(engine, asked) != alone


def test_a_refused_request_counts_for_nobody(build_engine: Build) -> None:
    engine = build_engine(engine={"replicas": 2, "router": "least_loaded"})
    with pytest.raises(UserError):
        engine.submit(Request(request_id="long", prompt_ids=(7,) * 500))
    assert engine._router.loads == [0, 0]
    assert not engine.has_work


def request(*prompt: int) -> Request:
    return Request(request_id="r", prompt_ids=prompt)


def test_round_robin_takes_turns() -> None:
    router = RoundRobin(3)
    assert [router.choose(request(1)) for _ in range(4)] == [0, 1, 2, 0]


def test_least_loaded_counts_what_ended() -> None:
    router = LeastLoaded(3)
    assert [router.choose(request(1)) for _ in range(5)] == [0, 1, 2, 0, 1]
    for _ in range(100):  # more than the heap keeps before it is cleaned
        router.finished(1)
        assert router.choose(request(1)) == 1 or router.loads == [2, 1, 2]
    router.finished(2)
    assert router.loads == [2, 1, 1]
    assert router.least() == 2


def test_prefix_affinity_yields_to_imbalance_and_forgets() -> None:
    router = PrefixAffine(4, max_imbalance=3)
    shared = tuple(range(128))
    first = router.choose(request(*shared, 1))
    others = [router.choose(request(*shared, index)) for index in range(2, 5)]
    assert others == [first] * 3
    assert router.choose(request(*shared, 9)) != first, "four more than the least loaded one is too many"
    short = router.choose(request(*shared[:60]))
    assert short != first, "less than a piece is no beginning"
    router.reset()
    assert router.choose(request(*shared, 1)) == 0


@pytest.mark.parametrize("options", [NativeOptions, SimulatedOptions])
def test_a_router_without_a_choice_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="replicas: 2 or more"):
        options(router="least_loaded")
