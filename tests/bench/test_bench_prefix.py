"""Block pool and prefix look-up for a prompt of 32,768 tokens in blocks of 16; the aim is under 1 ms."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix_reference.kv_paged import PagedLayout

TOKENS, BLOCK = 32_768, 16


def space_with(prefix_cache: str) -> Any:
    layout = PagedLayout(BLOCK, prefix_cache)
    return layout.space(layout.shape((KVGroup((0,), 1, 1, 1),), KVBudget(4, TOKENS + BLOCK, 2)))


def prompt(seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(128_256) for _ in range(TOKENS)]


def admission(prefix_cache: str, cached: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """What a scheduler asks of the space before it lets the prompt in, and what undoes it."""
    space, tokens = space_with(prefix_cache), prompt()
    if cached:
        assert space.reserve(0, TOKENS)
        space.register(0, tokens, TOKENS)
        space.release(0)
    expected = TOKENS - BLOCK if cached else 0
    expected += (BLOCK - 1) * (cached and prefix_cache == "radix")

    def admit() -> None:
        if prefix_cache != "off":
            assert space.match(1, tokens, TOKENS - 1) == expected
        assert space.reserve(1, TOKENS)

    def undo() -> None:
        space.release(1)
        if prefix_cache != "off":
            space.take_copies()

    return admit, undo


@pytest.mark.parametrize(
    ("prefix_cache", "cached"), [("off", False), ("hash", False), ("hash", True), ("radix", False), ("radix", True)]
)
def test_admission_of_a_long_prompt(benchmark: Any, prefix_cache: str, cached: bool) -> None:
    admit, undo = admission(prefix_cache, cached)
    benchmark.pedantic(admit, teardown=undo, rounds=200, iterations=1, warmup_rounds=20)


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_publishing_a_long_prompt(benchmark: Any, prefix_cache: str) -> None:
    """After the launch, beside the device's work."""
    space, tokens = space_with(prefix_cache), prompt()

    def begin() -> None:
        space.release(0)
        space.reset_prefixes()
        assert space.reserve(0, TOKENS)

    benchmark.pedantic(lambda: space.register(0, tokens, TOKENS), setup=begin, rounds=100, iterations=1)
