"""What trees emit follows the target: chi-square over sequences of one, two and three tokens; typical is lossy."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from infermix.roles.decoder import Forward, Want
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit import tree_verification
from infermix.toolkit.conformance.distribution import DRAWS, LIMITS, VOCABULARY, Bigrams, chi_square
from infermix.toolkit.tree_verification import DraftTree, TreeDecoder, Verified
from infermix_decoders.typical import TypicalTreeDecoder, longest_branch, typical_scores
from test_rejection_sampling import FEW
from torch import Tensor

#: Two guesses behind the text, then two behind the first of them and one behind one of those.
SHAPE = (-1, -1, 0, 0, 2)


class TreeBigrams(Bigrams):
    """Rows of every node, given its parent."""

    def forward(self, plan: Plan, want: Want = Want()) -> Forward:
        last: list[int] = []
        sequences: list[Sequence] = []
        positions: list[int] = []
        for entry in plan.entries:
            tree = DraftTree(entry.draft_ids, entry.draft_parents)
            row = [entry.sequence.tokens[-1], *entry.draft_ids]
            last += row
            sequences += [entry.sequence] * len(row)
            positions += [entry.sequence.num_tokens + depth for depth in (0, *tree.depths())]
        lanes = torch.tensor([seq.lane for seq in sequences])
        return Forward(self.table[torch.tensor(last)], sequences, lanes, positions)


class Likely:
    """Guesses the tokens that the target finds likeliest: what is accepted is no random choice."""

    num_nodes, reads_hidden = len(SHAPE), False

    def __init__(self, table: Tensor) -> None:
        self._best = table.argsort(dim=-1, descending=True).tolist()

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> Seq[DraftTree]:
        return [self._tree(sequence.tokens[-1]) for sequence in sequences]

    def _tree(self, last: int) -> DraftTree:
        tokens: list[int] = []
        for node, parent in enumerate(SHAPE):
            before = last if parent < 0 else tokens[parent]
            tokens.append(self._best[before][sum(SHAPE[:node].count(each) for each in (parent,))])
        return DraftTree(tuple(tokens), SHAPE)

    def observe(self, verified: Seq[Verified], forward: Forward) -> None:
        """Nothing to learn."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


def draw_sequences(
    kind: Any = TreeDecoder, length: int = 3, draws: int = DRAWS, **given: Any
) -> tuple[Tensor, float]:
    """`[draws, length]` tokens drawn after token 0, and the mean acceptance length."""
    target = TreeBigrams(1, draws)
    sequences = []
    for index in range(draws):
        params = SamplingParams(seed=index, temperature=1.0, max_new_tokens=64)
        sequences.append(
            Sequence(index, Request(request_id=str(index), prompt_ids=(0,), sampling=params), [0], 1, index)
        )
    decoder = kind(Likely(target.table), 3, 1024, uniform=False, **given)
    running = sequences
    while running:
        plan = Plan([Scheduled(seq, 1) for seq in running])
        for emission in decoder.collect(decoder.launch(plan, target, target.sampler)):
            emission.sequence.tokens.extend(emission.token_ids)
            emission.sequence.num_computed = len(emission.sequence.tokens) - 1
        running = [seq for seq in running if len(seq.tokens) <= length]
    counters = decoder.counters()
    drawn = torch.tensor([seq.tokens[1 : length + 1] for seq in sequences])
    return drawn, counters["verified_tokens"] / counters["verifications"]


@pytest.fixture(scope="module")
def table() -> Tensor:
    return Bigrams(1, 1).table


def test_distribution_of_the_target(table: Tensor) -> None:
    drawn, accepted = draw_sequences()
    for length, limit in LIMITS.items():
        assert chi_square(drawn, table, length) < limit
    assert accepted > 1.5


def test_taking_the_first_guess_is_seen(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(tree: DraftTree, draws: Seq[int]) -> tuple[int, ...]:
        return (0,)

    monkeypatch.setattr(tree_verification, "equal_draws", eager)
    assert chi_square(draw_sequences(length=1, draws=FEW)[0], table, 1) > LIMITS[1]


def test_reading_the_wrong_row_is_seen(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's draw in the place of its parent's."""
    follow = tree_verification.equal_draws
    monkeypatch.setattr(tree_verification, "equal_draws", lambda tree, draws: follow(tree, [*draws[1:], 0]))
    assert chi_square(draw_sequences(length=2, draws=FEW)[0], table, 2) > LIMITS[2]


def test_typical_acceptance_is_lossy_and_longer(table: Tensor) -> None:
    drawn, longer = draw_sequences(TypicalTreeDecoder, draws=FEW, epsilon=0.09, delta=0.3)
    assert chi_square(drawn, table, 1) > LIMITS[1]
    assert longer > draw_sequences(draws=FEW)[1]


def test_typical_thresholds() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]], dtype=torch.float64)
    parents, tokens = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([2, 3, 1, 0, 0])
    scores = typical_scores(torch.cat((p, p[:2])), parents, tokens, epsilon=0.2, delta=0.9)
    # exp(-H) is 1/2, 1/4 and about 0.84: enough are 0.2 and more, 0.2 (epsilon), 0.2.
    assert [score > float("-inf") for score in scores.tolist()] == [False, True, False, True, True]
    assert scores[1] == pytest.approx(torch.log(torch.tensor(0.25)).item())


def test_the_longest_branch_wins_then_the_likeliest() -> None:
    tree = DraftTree((1, 2, 3, 4, 5), (-1, -1, 0, 1, 1))
    none = float("-inf")
    assert longest_branch(tree, [-1.0, -0.1, none, -0.5, -0.4]) == (1, 4)
    assert longest_branch(tree, [-1.0, -0.1, none, none, none]) == (1,)
    assert longest_branch(tree, [none, none, -0.1, -0.1, -0.1]) == ()
    assert longest_branch(tree, [none, -3.0, -0.1, -4.0, none]) == (1, 3)


def test_greedy_requests_under_typical_acceptance_stay_greedy() -> None:
    p = torch.zeros(3, VOCABULARY, dtype=torch.float64)
    p[:, 2] = 1.0
    scores = typical_scores(p, torch.tensor([0, 0, 0]), torch.tensor([0, 2, 3]), epsilon=0.09, delta=0.3)
    assert [score == 0.0 for score in scores.tolist()] == [False, True, False]
