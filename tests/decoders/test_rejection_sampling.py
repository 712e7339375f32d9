"""Rejection sampling keeps the target's distribution: chi-square over sequences of one, two and three tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from infermix.toolkit import tree_verification
from infermix.toolkit.conformance.distribution import (
    DRAWS,
    LIMITS,
    VOCABULARY,
    Bigrams,
    chi_square,
    draw_sequences,
)
from infermix.toolkit.tree_verification import DraftTree, TreeDecoder
from infermix.toolkit.verification import VerifyingDecoder
from infermix_decoders import speculative
from infermix_decoders.draft_length import DraftLength
from infermix_decoders.speculative import SpeculativeDecoder
from torch import Tensor

#: Enough to see a mutant.
FEW = 5_000


def drawn_by(num_drafts: int, length: int = 3, draws: int = DRAWS, **sampling: Any) -> Tensor:
    """Tokens drawn by rejection sampling on two random bigram models."""
    decoder = SpeculativeDecoder(
        Bigrams(2, draws),
        DraftLength(num_drafts, adaptive=False, cost_ratio=0.1),
        1024,
        acceptance="rejection",
        uniform_steps=False,
    )
    return draw_sequences(decoder, Bigrams(1, draws), length, draws, **sampling)


class Guesses:
    """Drafts that are wrong more often than right, each with its own coin."""

    num_nodes, reads_hidden = 7, False

    def __init__(self) -> None:
        self._rng = random.Random(3)

    def _line(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(count)]

    def propose(self, sequence: Any, limit: Any) -> Any:
        """Of a sequence a line, of several sequences a tree each."""
        if isinstance(limit, int):
            return self._line(min(limit, 3))
        return [DraftTree(tuple(self._line(7)), (-1, -1, -1, 0, 0, 1, 3)) for _ in sequence]

    def observe(self, *given: Any) -> None:
        """Nothing to learn."""

    forget = observe


@pytest.mark.parametrize("kind", [VerifyingDecoder, pytest.param(TreeDecoder, marks=pytest.mark.full)],
                         ids=["line", "tree"])  # fmt: skip
def test_equal_draws_keep_the_distribution(kind: Any, table: Tensor) -> None:
    """The acceptance rule of certain drafts, in a line and in a tree."""
    decoder = kind(Guesses(), 3, 1024, uniform=False)
    drawn = draw_sequences(decoder, Bigrams(1, DRAWS), 3, DRAWS)
    assert decoder.counters()["accepted_draft_tokens"] > 0.1 * DRAWS
    for length, limit in LIMITS.items():
        assert chi_square(drawn, table, length) < limit


def test_a_tree_that_takes_any_guess_is_seen(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_verification, "equal_draws", lambda tree, draws: (0,) if tree.tokens else ())
    drawn = draw_sequences(TreeDecoder(Guesses(), 3, 1024, uniform=False), Bigrams(1, FEW), 2, FEW)
    assert chi_square(drawn, table, 2) > LIMITS[2]


@pytest.fixture(scope="module")
def table() -> Tensor:
    return Bigrams(1, 1).table


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_distribution_of_the_target(num_drafts: int, table: Tensor) -> None:
    drawn = drawn_by(num_drafts)
    for length, limit in LIMITS.items():
        assert chi_square(drawn, table, length) < limit


def test_with_temperature(table: Tensor) -> None:
    drawn = drawn_by(2, length=2, draws=FEW, temperature=1.7)
    assert chi_square(drawn, table, 2, temperature=1.7) < LIMITS[2]
    assert chi_square(drawn, table, 2, temperature=1.0) > LIMITS[2]


def test_filters_apply_to_both_models(table: Tensor) -> None:
    """With top-k 2 only the target's two best tokens can follow, whatever the draft's two are."""
    drawn = drawn_by(2, length=2, draws=FEW, top_k=2)
    best = table.topk(2, dim=-1).indices
    assert bool((drawn[:, 0][:, None] == best[0]).any(-1).all())
    assert bool((drawn[:, 1][:, None] == best[drawn[:, 0]]).any(-1).all())


MUTANTS = {
    "residual is p": lambda p, q: p,
    "residual is |p - q|": lambda p, q: (p - q).abs(),
}


@pytest.mark.parametrize("residual", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_residual_is_seen(residual: Any, table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "residual", residual)
    assert chi_square(drawn_by(1, length=1, draws=FEW), table, 1) > LIMITS[1]


def test_accepting_on_shared_noise_is_seen(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that decides about a draft must not also choose its replacement."""
    monkeypatch.setattr(speculative, "ACCEPT_STREAM", 0)
    assert chi_square(drawn_by(1, length=1, draws=FEW), table, 1) > LIMITS[1]
