"""Lookahead: its trees, its window from one step to the next, and that it finds n-grams that repeat nowhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from decoding import generate
from infermix.roles.decoder import Forward
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix.roles.scheduler import Scheduled
from infermix.toolkit.tree_verification import DraftTree, Verified, equal_draws
from infermix_decoders.lookahead import LookaheadDrafter, add_branches
from infermix_decoders.ngram_pool import NgramPool, text_ngrams
from infermix_decoders.options import LookaheadOptions

Build = Callable[..., Any]
PROMPT = (3, 1, 4, 1, 5)


def by_position(tree: DraftTree, length: int) -> list[int]:
    """The target of these tests: every position has a token of its own, behind right and wrong guesses."""
    return [100 + length, *(100 + length + depth for depth in tree.depths())]


class Run:
    """One sequence, verified by `by_position`."""

    def __init__(self, **options: Any) -> None:
        given = {"window": 4, "ngram": 3, "guesses": 3, "pool_from_prompt": False, **options}
        self.drafter = LookaheadDrafter(given.pop("window"), given.pop("ngram"), given.pop("guesses"), **given)
        request = Request(request_id="r", prompt_ids=PROMPT, sampling=SamplingParams(max_new_tokens=99))
        self.sequence = Sequence(0, request, list(PROMPT), len(PROMPT))

    def step(self, depth: int = 99) -> tuple[DraftTree, tuple[int, ...]]:
        (tree,) = self.drafter.propose([self.sequence], [depth])
        draws = by_position(tree, len(self.sequence.tokens))
        path = equal_draws(tree, draws)
        tokens = (*(tree.tokens[node] for node in path), draws[path[-1] + 1 if path else 0])
        entry = Scheduled(self.sequence, 1 + len(tree.tokens), tree.tokens, tree.parents)
        forward = Forward(None, [], None)  # type: ignore[arg-type]
        self.drafter.observe([Verified(entry, tokens, path, tuple(draws))], forward)
        self.sequence.tokens.extend(tokens)
        return tree, tokens

    @property
    def window(self) -> Any:
        return self.drafter._windows[0]


def test_the_window_is_a_line_with_branches() -> None:
    run = Run()
    tree, _ = run.step()
    assert len(tree.tokens) == 4 * 2
    assert tree.parents == (-1, 0, 1, 2, 0, 1, 2, 3)
    assert tree.depths() == [1, 2, 3, 4, 2, 3, 4, 5]


def test_levels_move_down_and_draws_come_in() -> None:
    run = Run()
    (tree,) = run.drafter.propose([run.sequence], [99])
    before = [list(level) for level in run.window.levels]
    entry = Scheduled(run.sequence, 9, tree.tokens, tree.parents)
    draws = tuple(range(100, 109))
    run.drafter.observe([Verified(entry, (100,), (), draws)], None)  # type: ignore[arg-type]
    assert run.window.levels == [before[1], [105, 106, 107, 108]]
    for column in range(4):
        assert run.window.pool.after(before[0][column])
        assert (before[1][column], 105 + column) in run.window.pool.after(before[0][column])


def test_more_new_tokens_move_the_columns() -> None:
    run = Run()
    (tree,) = run.drafter.propose([run.sequence], [99])
    second = list(run.window.levels[1])
    entry = Scheduled(run.sequence, 9, tree.tokens, tree.parents)
    run.drafter.observe([Verified(entry, (100, 101, 102), (0, 1), tuple(range(100, 109)))], None)  # type: ignore[arg-type]
    assert run.window.levels[0][:2] == second[2:]
    assert run.window.levels[1][:2] == [107, 108]
    assert all(len(level) == 4 for level in run.window.levels)


def test_it_finds_what_the_text_never_held() -> None:
    """No token comes twice: only the window can know what comes next."""
    run = Run()
    lengths = [len(run.step()[1]) for _ in range(30)]
    assert run.sequence.tokens[5:] == list(range(105, 105 + sum(lengths)))
    assert sum(lengths[10:]) > 2 * 20


def test_depth_and_guesses_are_bounded() -> None:
    run = Run(pool_from_prompt=True)
    for _ in range(10):
        tree, tokens = run.step(depth=2)
        assert max(tree.depths()) <= 2
        assert len(tree.tokens) <= run.drafter.num_nodes
        assert len(tokens) <= 3


def test_guesses_share_how_they_begin() -> None:
    """With each other and with the window, whose nodes stay as they are; no two nodes behind one are alike."""
    rng = random.Random(3)
    for _ in range(300):
        tokens, parents = [rng.randrange(3) for _ in range(4)], [-1, 0, 0, 1]
        tokens[2] = (tokens[1] + 1) % 3
        window, guesses = list(tokens), [tuple(rng.randrange(3) for _ in range(3)) for _ in range(4)]
        add_branches(tokens, parents, guesses)
        assert (tokens[:4], parents[:4]) == (window, [-1, 0, 0, 1])
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
        tree = DraftTree(tuple(tokens), tuple(parents))
        branches = {tree.branch(node) for node in range(len(tokens))}
        begun = {guess[:depth] for guess in guesses for depth in (1, 2, 3)}
        assert branches == begun | {DraftTree(tuple(window), (-1, 0, 0, 1)).branch(node) for node in range(4)}


def test_the_pool_forgets_the_oldest() -> None:
    pool = NgramPool(2, 2)
    for last in (1, 2, 1, 3):
        pool.add([(7, 0, last)])
    assert pool.after(7) == ((0, 3), (0, 1))
    assert pool.after(8) == ()
    pool.add([(7, 0, 4)] * 5000)
    assert pool.after(7) == ((0, 4), (0, 3))
    pool.add(text_ngrams([4, 5, 6, 8], 3, 2))
    assert pool.after(5) == ((6, 8),)
    assert pool.after(4) == ()


def test_the_pool_against_its_meaning() -> None:
    """Of all that was added the latest distinct ones, also when the pool was tidied on the way."""
    rng = random.Random(0)
    pool, added = NgramPool(2, 3), list[tuple[int, ...]]()
    for _ in range(1500):
        ngrams = [tuple(rng.randrange(9) for _ in range(3)) for _ in range(8)]
        pool.add(ngrams)
        added += ngrams
        token = rng.randrange(9)
        latest = dict.fromkeys(tuple(rest) for first, *rest in reversed(added) if first == token)
        assert pool.after(token) == tuple(latest)[:3]


def test_more_tokens_than_a_tree_has() -> None:
    with pytest.raises(msgspec.ValidationError, match="at most 63 tokens"):
        msgspec.convert({"window": 15, "ngram": 5, "guesses": 15}, LookaheadOptions)


def test_fewer_forwards_where_text_repeats(build_engine: Build) -> None:
    engine = build_engine(parts={"decoder": "lookahead"}, max_model_len=200)
    sampling = SamplingParams(max_new_tokens=120, ignore_eos=True)
    generate(engine, [Request(request_id="r", prompt_ids=(7, 8, 9) * 3, sampling=sampling)])
    counters = engine.report().counters
    assert counters["verified_tokens"] / counters["verifications"] > 1.3
