"""The sampler: distributions, filters, and draws that depend on seed and position alone."""

from __future__ import annotations

import math

import pytest
import torch
from infermix.roles.decoder import Forward
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix.toolkit.sampling import (
    TokenSampler,
    TorchSelector,
    draw,
    filter_probabilities,
    penalise_repetition,
    uniform,
    uniforms,
)
from infermix.toolkit.selection import Filters

VOCAB = 8


def sequence(seq_id: int, tokens: list[int], **sampling: object) -> Sequence:
    request = Request(request_id=str(seq_id), prompt_ids=tuple(tokens), sampling=SamplingParams(**sampling))  # type: ignore[arg-type]
    return Sequence(seq_id, request, list(tokens), len(tokens), lane=seq_id)


def sample(logits: torch.Tensor, sequences: list[Sequence], eos: tuple[int, ...] = ()) -> list[int]:
    sampler = TokenSampler(16, logits.shape[-1], torch.device("cpu"), eos)
    lanes = torch.tensor([seq.lane for seq in sequences])
    return sampler.sample(Forward(logits, sequences, lanes)).tolist()


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def test_uniform_is_flat_and_uncorrelated_between_positions() -> None:
    draws = [uniform(7, position) for position in range(20_000)]
    counts = torch.histc(torch.tensor(draws), bins=20, min=0, max=1)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 43.8  # 0.999 quantile of chi-square with 19 degrees of freedom
    pairs = torch.tensor(draws)
    correlation = torch.corrcoef(torch.stack([pairs[:-1], pairs[1:]]))[0, 1]
    assert abs(float(correlation)) < 4 / math.sqrt(20_000)


def test_uniform_differs_between_seeds() -> None:
    assert len({uniform(seed, 3) for seed in range(1000)}) == 1000


@pytest.mark.parametrize("stream", [0, 1, 1 << 40])
def test_many_at_once_are_those_of_one_at_a_time(stream: int) -> None:
    seeds = [0, 1, -1, -(1 << 63), (1 << 64) + 3, *range(10_000, 10_040)]
    positions = [131_072 * index // 45 for index in range(45)]
    made = uniforms(seeds, positions, stream).tolist()
    assert made == [uniform(seed, position, stream) for seed, position in zip(seeds, positions, strict=True)]
    assert len(set(made)) == 45


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_draws_follow_the_softmax(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(VOCAB)
    expected = torch.softmax(logits / temperature, -1)
    counts = torch.zeros(VOCAB)
    for seed in range(0, 4000, 16):
        rows = [sequence(i, [1, 2], temperature=temperature, seed=seed + i) for i in range(16)]
        for token in sample(logits.expand(16, -1), rows):
            counts[token] += 1
    chi_square = float(((counts - 4000 * expected) ** 2 / (4000 * expected)).sum())
    assert chi_square < 24.3  # 0.999 quantile with 7 degrees of freedom


def test_top_k_keeps_exactly_k_even_among_ties() -> None:
    kept = filter_probabilities(torch.zeros(1, VOCAB), torch.tensor([[3]]), column(1.0), column(0.0))
    assert kept.nonzero()[:, 1].tolist() == [0, 1, 2]


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    kept = filter_probabilities(logits, torch.tensor([[0]]), column(0.7), column(0.0))
    assert kept.nonzero()[:, 1].tolist() == [0, 1]


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    kept = filter_probabilities(logits, torch.tensor([[2]]), column(0.55), column(0.0))
    assert kept.nonzero()[:, 1].tolist() == [0]


def test_min_p_is_relative_to_the_most_likely() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.25, 0.1, 0.05]]))
    kept = filter_probabilities(logits, torch.tensor([[0]]), column(1.0), column(0.3))
    assert kept.nonzero()[:, 1].tolist() == [0, 1]


def test_the_most_likely_token_always_survives() -> None:
    kept = filter_probabilities(torch.zeros(1, VOCAB), torch.tensor([[1]]), column(1e-9), column(1.0))
    assert kept.nonzero()[:, 1].tolist() == [0]


def test_draw_never_picks_a_token_without_probability() -> None:
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    picked = {
        int(draw(probabilities, torch.tensor([[u]], dtype=torch.float64)))
        for u in (1e-12, 0.49, 0.5, 0.51, 1 - 1e-12)
    }
    assert picked == {1, 3}


@pytest.mark.parametrize("temperature", [1e-38, 1e-10, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 7.0, 30.0, -4.0]])
    assert sample(logits, [sequence(0, [1], temperature=temperature, seed=3)]) == [2]
    assert sample(logits, [sequence(0, [1], temperature=temperature, top_p=0.9, seed=3)]) == [2]


def test_a_draw_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, VOCAB)
    rows = [
        sequence(0, [1], temperature=1.0, seed=5),
        sequence(1, [1, 2], temperature=0.0),
        sequence(2, [3], temperature=2.0, top_p=0.8, seed=6),
        sequence(3, [4], temperature=0.9, top_k=3, repetition_penalty=1.3, seed=7),
    ]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_repetition_penalty_follows_the_definition() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    seen = torch.tensor([[True, True, False]])
    assert penalise_repetition(logits, seen, column(2.0)).tolist() == [[1.0, -4.0, 1.0]]


def test_repetition_penalty_counts_prompt_and_sampled_tokens() -> None:
    sampler = TokenSampler(4, 4, torch.device("cpu"), ())
    seq = sequence(0, [3], temperature=0.0, repetition_penalty=10.0)
    logits = torch.tensor([[1.0, 0.9, 0.2, 5.0]])
    picked = []
    for _ in range(3):
        token = int(sampler.sample(Forward(logits, [seq], torch.tensor([0]))))
        seq.tokens.append(token)
        picked.append(token)
    # Token 3 is in the prompt (5.0 -> 0.5); each pick is pushed under the next one.
    assert picked == [0, 1, 3]


def test_a_lane_that_changes_hands_starts_with_its_own_history() -> None:
    sampler = TokenSampler(4, 4, torch.device("cpu"), ())
    logits = torch.tensor([[1.0, 0.9, 0.2, 0.1]])
    first = sequence(0, [0], temperature=0.0, repetition_penalty=10.0)
    assert int(sampler.sample(Forward(logits, [first], torch.tensor([0])))) == 1
    second = sequence(7, [3], temperature=0.0, repetition_penalty=10.0)
    second.lane = 0
    assert int(sampler.sample(Forward(logits, [second], torch.tensor([0])))) == 0


def test_no_stop_token_before_min_new_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    early = sequence(0, [2], min_new_tokens=1)
    assert sample(logits, [early], eos=(1,)) == [2]
    early.tokens.append(2)
    assert sample(logits, [early], eos=(1,)) == [1]


def test_sampled_ids_stay_on_the_device_as_next_input() -> None:
    sampler = TokenSampler(4, 3, torch.device("cpu"), ())
    seq = sequence(2, [0])
    sampler.sample(Forward(torch.tensor([[0.0, 0.0, 4.0]]), [seq], torch.tensor([2])))
    assert sampler.next_ids.tolist() == [0, 0, 2, 0, 0]


class Recording(TorchSelector):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        self.calls.append("greedy")
        return super().greedy(logits)

    def draw(self, logits: torch.Tensor, filters: Filters) -> torch.Tensor:
        self.calls.append("draw, unfiltered" if filters.unfiltered else "draw")
        assert all(each.is_contiguous() for each in (filters.temperature, filters.top_k, filters.noise))
        return super().draw(logits, filters)


@pytest.mark.parametrize(
    ("sampling", "call"),
    [({}, "greedy"), ({"temperature": 1.0}, "draw, unfiltered"), ({"temperature": 1.0, "min_p": 0.1}, "draw")],
)
def test_a_selector_picks_every_token(sampling: dict[str, float], call: str) -> None:
    selector = Recording()
    sampler = TokenSampler(4, VOCAB, torch.device("cpu"), (), selector)
    seq = sequence(1, [3], **sampling)
    sampler.sample(Forward(torch.randn(1, VOCAB), [seq], torch.tensor([1])))
    assert selector.calls == [call]


def test_tokens_that_a_step_has_found_are_taken_unless_something_changes_the_logits() -> None:
    logits, found = torch.randn(1, VOCAB), torch.tensor([5])
    sampler = TokenSampler(4, VOCAB, torch.device("cpu"), ())
    plain = Forward(logits, [sequence(1, [3])], torch.tensor([1]), most_likely=found)
    assert sampler.sample(plain).tolist() == [5]
    assert sampler.next_ids[1] == 5
    best = int(logits.argmax())
    withheld = sequence(1, [3], min_new_tokens=2, stop_token_ids=(best,))
    ids = sampler.sample(Forward(logits, [withheld], torch.tensor([1]), most_likely=torch.tensor([best])))
    assert int(ids) == int(logits.argsort(descending=True)[0, 1])
