"""Prefix caching changes what is computed, never what comes out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from infermix.errors import UserError
from infermix.roles.request import Request, SamplingParams

Build = Callable[..., Any]
BYTES_PER_TOKEN = 2 * 2 * (16 + 16) * 4
SCHEDULERS = [
    ("static", {"batch_size": 3}),
    ("continuous", {}),
    ("continuous", {"max_num_batched_tokens": 24, "chunked": True, "max_num_seqs": 3}),
]


def cached(kind: str, block_size: int = 4, **options: Any) -> dict[str, Any]:
    return {"kv": ("paged", {"block_size": block_size, "prefix_cache": kind, **options})}


def family(seed: int, count: int = 9) -> list[tuple[int, ...]]:
    """Prompts over two stems of 21 and 32 tokens, cut anywhere and continued, some equal, some extending others."""
    rng = random.Random(seed)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(6, 96) for _ in range(length))

    stems = (draw(21), draw(32))
    prompts = [stem[: rng.randint(1, len(stem))] + draw(rng.randrange(0, 12)) for stem in stems for _ in range(count)]
    prompts += [stems[0], stems[0], stems[1] + (7,), prompts[3] + draw(9)]
    rng.shuffle(prompts)
    return prompts


def requests(prompts: list[tuple[int, ...]], **sampling: Any) -> list[Request]:
    given = {"max_new_tokens": 7, "ignore_eos": True, **sampling}
    return [
        Request(request_id=str(i), prompt_ids=prompt, sampling=SamplingParams(**{**given, "seed": i}))
        for i, prompt in enumerate(prompts)
    ]


def run(engine: Any, wanted: list[Request], arrive_every: int = 0) -> dict[str, list[int]]:
    """All at once, or one more request every so many steps."""
    late, tokens = list(wanted), {request.request_id: list[int]() for request in wanted}
    for step in range(3000):
        if late and (not arrive_every or step % arrive_every == 0):
            for request in [late.pop(0)] if arrive_every else late:
                engine.submit(request)
            late = late if arrive_every else []
        if not engine.has_work and not late:
            return tokens
        for event in engine.step() if engine.has_work else []:
            tokens[event.request_id] += event.token_ids
    raise AssertionError("the engine did not finish")


UNCACHED: dict[str, list[int]] = {}


@pytest.fixture
def plain(build_engine: Build) -> dict[str, list[int]]:
    if not UNCACHED:
        UNCACHED.update(run(build_engine(), requests(family(0))))
    return UNCACHED


@pytest.mark.parametrize("kind", ["hash", "radix"])
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=["static", "continuous", "chunked"])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_greedy_tokens_are_those_of_the_uncached_run(
    build_engine: Build, plain: dict[str, list[int]], kind: str, scheduler: Any, overlap: str
) -> None:
    engine = build_engine({**cached(kind), "scheduler": scheduler}, engine={"overlap": overlap})
    assert run(engine, requests(family(0)), arrive_every=2) == plain
    first = engine.report().counters
    assert first["prefix_hit_tokens"] > 60
    assert first["prefix_queried_tokens"] == sum(map(len, family(0)))
    computed = first["prefix_queried_tokens"] - first["prefix_hit_tokens"] + 6 * len(family(0))
    assert first["computed_tokens"] == computed
    assert run(engine, requests(family(0))) == plain
    again = engine.report().counters["prefix_hit_tokens"] - first["prefix_hit_tokens"]
    assert again > 0.8 * first["prefix_queried_tokens"]
    assert engine._space.usage().allocated_tokens == 0


@pytest.mark.parametrize("kind", ["hash", "radix"])
@pytest.mark.parametrize(
    "scheduler",
    [
        ("static", {"batch_size": 3}),
        ("continuous", {}),
        ("continuous", {"max_num_batched_tokens": 28, "chunked": True}),
    ],
    ids=["static", "continuous", "chunked"],
)
def test_requests_of_one_step_share_what_it_computes(build_engine: Build, kind: str, scheduler: Any) -> None:
    """Whole blocks only, for the tree too: the beginning of a block cannot be copied before it is written."""
    first = tuple(range(10, 31))
    wanted = requests([first, (*first, 50, 51), (*first[:17], 60, 61, 62)], max_new_tokens=5)
    engine = build_engine({**cached(kind), "scheduler": scheduler})
    for request in wanted:
        engine.submit(request)
    tokens = {event.request_id: list(event.token_ids) for event in engine.step()}
    assert engine.report().counters["prefix_hit_tokens"] == 20 + 16
    assert engine.report().counters["computed_tokens"] == 21 + 3 + 4
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert tokens == run(build_engine(), wanted)


@pytest.mark.parametrize("kind", ["hash", "radix"])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_memory_pressure_evicts_and_preempts_without_a_trace(
    build_engine: Build, plain: dict[str, list[int]], kind: str, overlap: str
) -> None:
    engine = build_engine(
        cached(kind), engine={"overlap": overlap}, max_model_len=64, kv_memory_bytes=BYTES_PER_TOKEN * 100
    )
    assert run(engine, requests(family(0))) == plain
    counters = engine.report().counters
    assert counters["preemptions"] > 0
    assert counters["prefix_evicted_blocks"] > 0
    assert counters["resumed_hit_tokens"] > 0
    assert engine._space.usage().allocated_tokens == 0


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_swapped_sequences_come_back_to_shared_blocks(
    build_engine: Build, plain: dict[str, list[int]], kind: str
) -> None:
    engine = build_engine(
        {**cached(kind), "scheduler": ("continuous", {"preemption": "swap"})}, engine={"overlap": "on"},
        max_model_len=64, kv_memory_bytes=BYTES_PER_TOKEN * 100, kv_swap_bytes=BYTES_PER_TOKEN * 200,
    )  # fmt: skip
    assert run(engine, requests(family(0))) == plain
    counters = engine.report().counters
    assert counters["preemptions"] > 0
    assert counters["prefix_hit_tokens"] > 0
    assert engine._space.usage().allocated_tokens == 0


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_logits_after_a_hit_are_those_without(build_engine: Build, kind: str) -> None:
    """Not only the greedy token: the logits rows of every sampled position."""
    rows: dict[str, list[torch.Tensor]] = {}

    def watch(engine: Any, name: str) -> None:
        sample = engine._sampler.sample

        def noting(forward: Any) -> torch.Tensor:
            rows.setdefault(name, []).extend(forward.logits.clone())
            return sample(forward)

        engine._sampler.sample = noting

    prompt = family(3)[0] + tuple(range(10, 40))
    for name, parts in (("plain", {}), (kind, cached(kind))):
        engine = build_engine(parts)
        run(engine, requests([prompt[:25]]))
        watch(engine, name)
        run(engine, requests([prompt]))
    assert len(rows["plain"]) == len(rows[kind]) == 7
    assert torch.allclose(torch.stack(rows[kind]), torch.stack(rows["plain"]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "hit"), [("hash", 20), ("radix", 22)])
def test_what_is_hit_is_not_computed(build_engine: Build, kind: str, hit: int) -> None:
    engine = build_engine(cached(kind))
    prompt = tuple(range(10, 32))
    run(engine, requests([(*prompt, 50, 51)], max_new_tokens=1))
    before = engine.report().counters["computed_tokens"]
    run(engine, requests([(*prompt, 60, 61, 62)], max_new_tokens=1))
    counters = engine.report().counters
    assert counters["prefix_hit_tokens"] == hit
    assert (counters["prefix_hits"], counters["prefix_queries"]) == (1, 2)
    assert counters["computed_tokens"] - before == 25 - hit


@pytest.mark.parametrize(("kind", "hit"), [("hash", 12), ("radix", 15)])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(
    build_engine: Build, kind: str, hit: int
) -> None:
    engine = build_engine(cached(kind))
    prompt = tuple(range(10, 26))
    first = run(engine, requests([prompt]))
    assert run(engine, requests([prompt])) == first
    assert engine.report().counters["prefix_hit_tokens"] == hit


def test_a_conversation_goes_on_from_its_own_output(build_engine: Build) -> None:
    """The tree also keeps the partly filled last block of what ended: all but the newest tokens are there."""
    engine, prompt = build_engine(cached("radix", block_size=16)), tuple(range(10, 30))
    answer = run(engine, requests([prompt], max_new_tokens=6))["0"]
    turn = (*prompt, *answer, 70, 71, 72)
    tokens = run(engine, requests([turn]))
    assert engine.report().counters["prefix_hit_tokens"] == len(prompt) + len(answer) - 1
    assert tokens == run(build_engine(), requests([turn]))


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_another_salt_shares_nothing(build_engine: Build, kind: str) -> None:
    engine, prompt = build_engine(cached(kind)), tuple(range(10, 40))
    for salt, expected in (("", 0), ("adapter-1", 0), ("adapter-1", 28)):
        before = engine.report().counters["prefix_hit_tokens"]
        run(
            engine,
            [Request(request_id="0", prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=1), cache_salt=salt)],
        )
        hit = engine.report().counters["prefix_hit_tokens"] - before
        assert hit == (expected + (kind == "radix") if expected else 0)


@pytest.mark.parametrize(("keep", "hits"), [(False, 0), (True, 28)])
def test_reset_forgets_unless_told_to_keep(build_engine: Build, keep: bool, hits: int) -> None:
    engine = build_engine(cached("hash", keep_between_repeats=keep))
    for _ in range(2):
        engine.reset()
        run(engine, requests([tuple(range(10, 40))]))
    assert engine.report().counters["prefix_hit_tokens"] == hits


def test_without_the_option_nothing_is_shared_or_counted(build_engine: Build) -> None:
    engine = build_engine()
    run(engine, requests([tuple(range(10, 40))] * 3), arrive_every=3)
    counters = engine.report().counters
    assert not [name for name in counters if "prefix" in name]
    assert counters["computed_tokens"] == 3 * (30 + 6)


LAYOUTS = [
    "none",
    "concat",
    "dense",
    ("paged", {"block_size": 4}),
    ("paged", {"block_size": 4, "prefix_cache": "radix"}),
]


@pytest.mark.parametrize("kv", LAYOUTS)
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=["static", "continuous", "chunked"])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_forks_give_the_tokens_of_requests_of_their_own(
    build_engine: Build, kv: Any, scheduler: Any, overlap: str
) -> None:
    """Parallel samples of one prompt, forked at several moments; one of them goes another way after the prompt."""
    prompt = tuple(range(20, 37))
    wanted = [
        Request(
            request_id=str(i), prompt_ids=prompt + (77,) * (i == 2),
            sampling=SamplingParams(max_new_tokens=9, temperature=1.0, seed=i, ignore_eos=True),
        )
        for i in range(5)
    ]  # fmt: skip
    alone = run(build_engine(), wanted)
    engine = build_engine({"kv": kv, "scheduler": scheduler}, engine={"overlap": overlap})
    tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    engine.submit(wanted[0])
    late = wanted[1:]
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
        if late and engine.has_work and "0" in {seq.request.request_id for seq in engine._live.values()}:
            engine.fork("0", late.pop(0))
    assert not late
    assert tokens == alone
    assert engine._space.usage().allocated_tokens == 0


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_forks_under_memory_pressure_end_with_the_right_tokens(build_engine: Build, overlap: str) -> None:
    prompt = tuple(range(20, 45))
    sampling = [SamplingParams(max_new_tokens=20, temperature=1.0, seed=i, ignore_eos=True) for i in range(6)]
    wanted = [Request(request_id=str(i), prompt_ids=prompt, sampling=sampling[i]) for i in range(6)]
    alone = run(build_engine(), wanted)
    engine = build_engine(
        {"kv": ("paged", {"block_size": 4})}, engine={"overlap": overlap}, max_model_len=48,
        kv_memory_bytes=BYTES_PER_TOKEN * 64,
    )  # fmt: skip
    tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    engine.submit(wanted[0])
    for event in [*engine.step(), *engine.step()]:
        tokens[event.request_id] += event.token_ids
    for request in wanted[1:]:
        engine.fork("0", request)
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert tokens == alone
    assert engine.report().counters["preemptions"] > 0
    assert engine._space.usage().allocated_tokens == 0


def test_a_fork_computes_only_what_is_new(build_engine: Build) -> None:
    engine = build_engine({"kv": ("paged", {"block_size": 4})})
    first, second = requests([tuple(range(20, 50))] * 2, max_new_tokens=3)
    engine.submit(first)
    engine.step()
    engine.fork("0", second)
    engine.step()
    assert engine.report().counters["computed_tokens"] == 30 + 1 + 1
    assert engine.report().counters["kv_copied_blocks"] == 1


def test_nothing_is_forked_from_a_request_that_does_not_run(build_engine: Build) -> None:
    with pytest.raises(UserError, match="'7' is not running"):
        build_engine().fork("7", requests([(9, 9)])[0])
