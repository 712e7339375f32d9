"""Conformance of lossless decoders when sampling: sequences of one to three tokens have the target's distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from infermix.roles.component import Component
from infermix.roles.decoder import Decoder, Forward, Want
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.conformance.component import example_model
from infermix.toolkit.conformance.decoder import toy_context
from infermix.toolkit.sampling import TokenSampler
from infermix.toolkit.tree_verification import DraftTree

VOCABULARY = 5
DRAWS = 20_000
#: Sequences at once: a draft layer keeps KV for each.
LANES = 500
#: Sequence length -> 0.9999 quantile of chi-square for 5^length - 1 degrees of freedom.
LIMITS = {1: 23.5, 2: 58.6, 3: 190.7}


class Bigrams:
    """A model whose next-token logits depend on the last token alone: as target, and as a second model.

    Several rows per sequence, in a line or a tree; tokens in flight come from the sampler's table, as on a device.
    """

    tokenizer = None
    kv_bytes = 0
    weight_bytes = 1

    def __init__(self, seed: int, lanes: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = scale * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        self.sampler = TokenSampler(lanes, VOCABULARY, torch.device("cpu"), ())
        self.facts = replace(example_model(), vocab_size=VOCABULARY)
        self.hidden = torch.randn(VOCABULARY, self.facts.hidden_size, generator=generator)
        self.runner = self.space = self

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
            parents = entry.draft_parents or tuple(range(-1, len(entry.draft_ids) - 1))
            depths = DraftTree(entry.draft_ids, parents).depths()
            positions += [seq.num_tokens + depth for depth in (0, *depths)]
        lanes = torch.tensor([seq.lane for seq in sequences])
        # Drafts of tokens that it never says are never accepted: what follows them does not matter.
        said = torch.tensor(last) % VOCABULARY
        found = Forward(self.table[said], sequences, lanes, positions if want.draft_logits else None)
        if want.hidden:
            found.hidden, found.hidden_rows = self.hidden[said], list(range(len(last)))
            found.first_rows = {seq.seq_id: row for row, seq in reversed(list(enumerate(sequences)))}
        return found

    def reserve(self, *given: Any) -> bool:
        return True

    def truncate(self, *given: Any) -> None:
        """No KV."""

    release = truncate


def draw_sequences(
    decoder: Decoder, target: Bigrams, length: int, draws: int, first_seed: int = 0, **sampling: Any
) -> Tensor:
    """`[draws, length]` tokens that the decoder draws after token 0, each sequence with a seed of its own."""
    params = {"temperature": 1.0, "max_new_tokens": 64, **sampling}
    running = []
    for lane in range(draws):
        seed = first_seed + lane
        request = Request(request_id=str(seed), prompt_ids=(0,), sampling=SamplingParams(seed=seed, **params))
        running.append(Sequence(seed, request, [0], 1, lane=lane))
    sequences = running
    while running:
        plan = Plan([Scheduled(seq, 1) for seq in running])
        for emission in decoder.collect(decoder.launch(plan, target, target.sampler)):  # type: ignore[arg-type]
            emission.sequence.tokens.extend(emission.token_ids)
            emission.sequence.num_computed = len(emission.sequence.tokens) - 1
        running = [seq for seq in running if len(seq.tokens) <= length]
    forget = getattr(decoder, "forget", lambda sequence: None)
    for seq in sequences:
        forget(seq)
    return torch.tensor([seq.tokens[1 : length + 1] for seq in sequences])


def chi_square(drawn: Tensor, table: Tensor, length: int, temperature: float = 1.0) -> float:
    """Of the first `length` tokens against the joint distribution of bigrams with these logits."""
    p = torch.softmax(table.double() / temperature, -1)
    joint, last = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    for _ in range(length):
        joint = (joint[:, None] * p[last]).flatten()
        last = torch.arange(VOCABULARY).repeat(len(last))
    powers = VOCABULARY ** torch.arange(length - 1, -1, -1)
    counts = torch.bincount((drawn[:, :length] * powers).sum(-1), minlength=VOCABULARY**length)
    expected = joint * len(drawn)
    return float(((counts - expected) ** 2 / expected).sum())


@torch.inference_mode()
def check_distribution(component: Component, options: Any = None, *, draws: int = DRAWS) -> None:
    """Chi-square over `draws` sequences. A draft model, where the decoder asks for one, is another random bigram."""
    options = component.options() if options is None else options
    target = Bigrams(1, LANES)
    context = replace(
        toy_context(), facts=target.facts, max_num_seqs=LANES, tokenizer=None,
        second=lambda *given, **named: Bigrams(2, LANES),
    )  # fmt: skip
    decoder, longest = component.build(options, context), max(LIMITS)
    seeds = range(0, draws, LANES)
    drawn = torch.cat([draw_sequences(decoder, target, longest, min(LANES, draws - seed), seed) for seed in seeds])
    for length, limit in LIMITS.items():
        found = chi_square(drawn, target.table, length)
        assert found < limit, f"{component.name}: chi-square {found:.1f} over {length} tokens, at most {limit}"
