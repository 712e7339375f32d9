"""Which layers a draft does without: agreement with the whole model on text, per cost."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infermix_decoders.draft_length import expected_tokens
from infermix_decoders.skipped_layers import keep_layers

Ids = Seq[Seq[int]]


@dataclass(frozen=True, slots=True)
class Skipped:
    """Layers left out, the share of next tokens that stay the same, and the speed-up expected of drafting so."""

    layers: tuple[int, ...]
    agreement: float
    speedup: float


def search_layers(
    model: nn.Module,
    samples: Ids,
    cost_of: Callable[[int], float],
    num_draft_tokens: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Skipped:
    """Leave out one layer after the other, the one first whose absence alone changes the fewest next tokens.

    A layer stays where leaving it out as well would make drafting slower: `expected_tokens(agreement)` over the cost
    `num_draft_tokens * cost_of(number of layers kept) + 1`, in forwards of the whole model (Zhang et al., 2024,
    "Draft & Verify", search the same choice by Bayesian optimisation). Takes two forwards of the text per layer.
    """
    config: Any = model.config
    number = config.get_text_config(decoder=True).num_hidden_layers
    whole = _next_tokens(keep_layers(model, range(number)), samples)

    def judge(skipped: Seq[int]) -> Skipped:
        kept = [index for index in range(number) if index not in skipped]
        same = _next_tokens(keep_layers(model, kept), samples) == whole
        agreement = float(same.double().mean())
        cost = num_draft_tokens * cost_of(len(kept)) + 1
        return Skipped(tuple(sorted(skipped)), agreement, expected_tokens(agreement, num_draft_tokens) / cost)

    alone = []
    for index in range(number if number > 1 else 0):
        alone.append(judge([index]))
        progress((index + 1) / (2 * number))
    best = Skipped((), 1.0, expected_tokens(1.0, num_draft_tokens) / (num_draft_tokens * cost_of(number) + 1))
    for step, single in enumerate(sorted(alone, key=lambda each: -each.agreement), 1):
        if len(best.layers) < number - 1:
            tried = judge([*best.layers, *single.layers])
            best = max(best, tried, key=lambda each: each.speedup)
        progress((number + step) / (2 * number))
    return best


@torch.inference_mode()
def _next_tokens(model: Any, samples: Ids) -> Tensor:
    """The most likely token after every token of the samples, one after the other."""
    found = []
    for sample in samples:
        ids = torch.tensor([sample], device=model.device)
        found.append(model(input_ids=ids, use_cache=False).logits[0].argmax(-1))
    return torch.cat(found)
