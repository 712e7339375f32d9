"""Conformance of decoders that fill in masks (`decoder:unmasks`), over a toy model that answers for every row."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import torch

from infermix.roles.component import Component
from infermix.roles.decoder import Decoder, DecoderContext, Forward, Runner, Sampler, Want
from infermix.roles.facts import ModelFacts
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled

#: Of a vocabulary of 128.
MASK = 127
_BIDIRECTIONAL = frozenset({"model:bidirectional", "model:mask_token", "attn:noncausal", "kv:recompute"})
_NEW_TOKENS = (1, 7, 40)


def masked_model(facts: ModelFacts) -> ModelFacts:
    """The same model, filling in masks."""
    return replace(facts, features=facts.features | _BIDIRECTIONAL, mask_token_id=MASK)


class _UnevenlySure:
    """A runner whose model is surer of some positions than of others, in no order from left to right."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.reserve, self.copy = runner.reserve, runner.copy

    def forward(self, plan: Plan, want: Want = Want()) -> Forward:
        forward = self._runner.forward(plan, want)
        assert forward.positions is not None, "which row is a mask's, where there is one row per sequence?"
        forward.logits *= torch.tensor([1.0 + 7 * position % 5 for position in forward.positions])[:, None]
        return forward


def check_unmasking(
    component: Component,
    options: Any,
    context: DecoderContext,
    parts: tuple[Callable[[], Runner], Callable[[], Sampler]],
    make_sequence: Callable[..., Sequence],
) -> None:
    """Sequences of several lengths end with as many tokens as they ask for, none of them a mask.

    There is one emission for each in every step, of any number of tokens, and no more steps than tokens; what a
    sequence gets does not depend on what runs beside it. `parts` make a runner and a sampler.
    """
    context = replace(context, facts=masked_model(context.facts))

    def run(wanted: Many[int]) -> dict[int, list[int]]:
        sequences = []
        for lane, index in enumerate(wanted):
            sequence = make_sequence(index, 3 + 2 * index, _NEW_TOKENS[index])
            sequence.lane = lane
            sequence.tokens[:] = [(5 * position + index) % 31 for position in range(len(sequence.tokens))]
            sequences.append(sequence)
        _drive(component.build(options, context), sequences, parts)
        return {each.seq_id: each.tokens[each.num_prompt_tokens :] for each in sequences}

    together = run(range(len(_NEW_TOKENS)))
    for index, count in enumerate(_NEW_TOKENS):
        found = together[index]
        assert len(found) == count, f"{len(found)} tokens where {count} were asked for"
        assert MASK not in found, f"a mask among the tokens {found}"
        assert run([index])[index] == found, f"sequence {index} alone gets other tokens than among others"


def _drive(
    decoder: Decoder, sequences: Many[Sequence], parts: tuple[Callable[[], Runner], Callable[[], Sampler]]
) -> None:
    runner, sampler = _UnevenlySure(parts[0]()), parts[1]()
    for _ in range(max(_NEW_TOKENS)):
        entries = [Scheduled(each, each.num_uncomputed) for each in sequences if not each.exhausted]
        if not entries:
            return
        emissions = decoder.collect(decoder.launch(Plan(entries), runner, sampler))
        got = sorted(each.sequence.seq_id for each in emissions)
        assert got == [entry.sequence.seq_id for entry in entries], f"emissions for {got}"
        for emission in emissions:
            assert emission.token_ids or emission.num_drafts, "no token, and nothing says that there were drafts"
            emission.sequence.tokens.extend(emission.token_ids)
            emission.sequence.num_computed = len(emission.sequence.tokens) - 1
    left = [each.seq_id for each in sequences if not each.exhausted]
    assert not left, f"sequences {left} have not ended after as many steps as they have tokens"
