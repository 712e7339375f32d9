"""Conformance of decoders: a model that is one line of arithmetic, driven step by step."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from infermix.roles.component import Component
from infermix.roles.decoder import Decoder, Forward, Want
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.conformance.scheduler import make_sequence

VOCABULARY = 31


def next_token(tokens: Many[int]) -> int:
    """The toy model: its greedy continuation depends on every token and on their number."""
    return (7 * sum(tokens) + 3 * len(tokens) + tokens[-1]) % VOCABULARY


class _ToyRunner:
    def forward(self, plan: Plan, want: Want = Want()) -> Forward:
        rows: list[list[int]] = []
        sequences: list[Sequence] = []
        for entry in plan.entries:
            seq, new = entry.sequence, entry.num_new_tokens
            ends = range(seq.num_computed + 1, seq.num_computed + new + 1)
            if not want.all_logits:
                ends = ends[-1:] if new == seq.num_uncomputed else range(0)
            rows += [seq.tokens[:end] for end in ends]
            sequences += [seq] * len(ends)
        logits = torch.zeros(len(rows), VOCABULARY)
        for row, tokens in enumerate(rows):
            logits[row, next_token(tokens)] = 1.0
        return Forward(logits, sequences, torch.tensor([seq.lane for seq in sequences], dtype=torch.int64))


class _ToySampler:
    def sample(self, forward: Forward) -> Tensor:
        return forward.logits.argmax(-1)


def check_decoder(component: Component, options: Any = None, *, num_steps: int = 12) -> None:
    """Several sequences, one with its prompt in two chunks: nothing may come out before a prompt is complete.

    A lossless decoder must emit exactly the model's greedy continuation; every decoder gives each sequence of a
    complete prompt at least one token a step.
    """
    options = component.options() if options is None else options
    decoder: Decoder = component.build(options, None)
    sequences = [make_sequence(index, prompt, 100) for index, prompt in enumerate((1, 4, 9))]
    for lane, seq in enumerate(sequences):
        seq.tokens[:] = [(5 * position + lane) % VOCABULARY for position in range(len(seq.tokens))]
        seq.lane = lane
    expected = {seq.seq_id: _continuation(seq.tokens, 40 * num_steps) for seq in sequences}
    for step in range(num_steps):
        entries = [
            Scheduled(seq, 5 if step == 0 and seq.num_uncomputed > 5 else seq.num_uncomputed) for seq in sequences
        ]
        _run_step(decoder, Plan(entries))
    for seq in sequences:
        emitted = seq.tokens[seq.num_prompt_tokens :]
        assert len(emitted) >= num_steps - 1, f"{len(emitted)} tokens in {num_steps} steps"
        if component.lossless(options):
            correct = expected[seq.seq_id][: len(emitted)]
            assert emitted == correct, f"{component.name} emits {emitted}, the model says {correct}"


def _run_step(decoder: Decoder, plan: Plan) -> None:
    complete = {e.sequence.seq_id for e in plan.entries if e.num_new_tokens == e.sequence.num_uncomputed}
    emissions = decoder.collect(decoder.launch(plan, _ToyRunner(), _ToySampler()))
    got = [emission.sequence.seq_id for emission in emissions]
    assert len(set(got)) == len(got), f"two emissions for one sequence in one step: {got}"
    assert set(got) == complete, f"tokens for {sorted(got)}, expected for {sorted(complete)}"
    for entry in plan.entries:
        entry.sequence.num_computed += entry.num_new_tokens
    for emission in emissions:
        assert emission.token_ids, f"an empty emission for {emission.sequence.request.request_id}"
        emission.sequence.tokens.extend(emission.token_ids)
        emission.sequence.num_computed = len(emission.sequence.tokens) - 1


def _continuation(tokens: Many[int], count: int) -> list[int]:
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(tokens) :]
