"""Rejection sampling keeps the target's distribution: chi-square over sequences of one, two and three tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.roles.decoder import Forward, Want
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.sampling import TokenSampler
from infermix_decoders import speculative
from infermix_decoders.draft_length import DraftLength
from infermix_decoders.speculative import SpeculativeDecoder
from torch import Tensor

VOCAB = 5
DRAWS = 20_000
#: Enough to see a mutant.
FEW = 5_000
#: 0.9999 quantiles of chi-square for 4, 24 and 124 degrees of freedom.
LIMITS = {1: 23.5, 2: 58.6, 3: 190.7}


class Bigrams:
    """A model whose next-token logits depend on the last token; several rows per sequence, tokens in flight."""

    def __init__(self, seed: int, lanes: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = scale * torch.randn(VOCAB, VOCAB, generator=generator)
        self.sampler = TokenSampler(lanes, VOCAB, torch.device("cpu"), ())
        self.runner = self.space = self
        self.weight_bytes = 1

    def forward(self, plan: Plan, want: Want = Want()) -> Forward:
        last: list[int] = []
        sequences, positions = [], []
        in_flight = self.sampler.next_ids.tolist()
        for entry in plan.entries:
            seq = entry.sequence
            own = in_flight[seq.lane] if seq.num_inflight else seq.tokens[-1]
            row = [own, *entry.draft_ids]
            last += row
            sequences += [seq] * len(row)
            positions += [seq.num_tokens + index for index in range(len(row))]
        lanes = torch.tensor([seq.lane for seq in sequences])
        return Forward(self.table[torch.tensor(last)], sequences, lanes, positions if want.draft_logits else None)

    def reserve(self, *given: Any) -> bool:
        return True

    def truncate(self, *given: Any) -> None:
        """No KV."""

    release = truncate


def draw_sequences(num_drafts: int, length: int = 3, draws: int = DRAWS, **sampling: Any) -> Tensor:
    """`[draws, length]` tokens drawn after token 0 by speculative decoding on two random bigram models."""
    target, draft = Bigrams(1, draws), Bigrams(2, draws)
    params = {"temperature": 1.0, "max_new_tokens": 64, **sampling}
    sequences = []
    for index in range(draws):
        request = Request(request_id=str(index), prompt_ids=(0,), sampling=SamplingParams(seed=index, **params))
        sequences.append(Sequence(index, request, [0], 1, lane=index))
    decoder = SpeculativeDecoder(
        draft,
        DraftLength(num_drafts, adaptive=False, cost_ratio=0.1),
        1024,
        acceptance="rejection",
        uniform_steps=False,
    )
    running = sequences
    while running:
        plan = Plan([Scheduled(seq, 1) for seq in running])
        for emission in decoder.collect(decoder.launch(plan, target, target.sampler)):
            emission.sequence.tokens.extend(emission.token_ids)
            emission.sequence.num_computed = len(emission.sequence.tokens) - 1
        running = [seq for seq in running if len(seq.tokens) <= length]
    return torch.tensor([seq.tokens[1 : length + 1] for seq in sequences])


def chi_square(drawn: Tensor, table: Tensor, length: int, temperature: float = 1.0) -> float:
    """Of the first `length` tokens against the target's joint distribution."""
    p = torch.softmax(table.double() / temperature, -1)
    joint, last = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    for _ in range(length):
        joint = (joint[:, None] * p[last]).flatten()
        last = torch.arange(VOCAB).repeat(len(last))
    powers = VOCAB ** torch.arange(length - 1, -1, -1)
    counts = torch.bincount((drawn[:, :length] * powers).sum(-1), minlength=VOCAB**length)
    expected = joint * len(drawn)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.fixture(scope="module")
def table() -> Tensor:
    return Bigrams(1, 1).table


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_distribution_of_the_target(num_drafts: int, table: Tensor) -> None:
    drawn = draw_sequences(num_drafts)
    for length, limit in LIMITS.items():
        assert chi_square(drawn, table, length) < limit


def test_with_temperature(table: Tensor) -> None:
    drawn = draw_sequences(2, length=2, draws=FEW, temperature=1.7)
    assert chi_square(drawn, table, 2, temperature=1.7) < LIMITS[2]
    assert chi_square(drawn, table, 2, temperature=1.0) > LIMITS[2]


def test_filters_apply_to_both_models(table: Tensor) -> None:
    """With top-k 2 only the target's two best tokens can follow, whatever the draft's two are."""
    drawn = draw_sequences(2, length=2, draws=FEW, top_k=2)
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
    assert chi_square(draw_sequences(1, length=1, draws=FEW), table, 1) > LIMITS[1]


def test_accepting_on_shared_noise_is_seen(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that decides about a draft must not also choose its replacement."""
    monkeypatch.setattr(speculative, "ACCEPT_STREAM", 0)
    assert chi_square(draw_sequences(1, length=1, draws=FEW), table, 1) > LIMITS[1]
