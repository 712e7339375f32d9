"""Which layers a draft does without: agreement with the whole model on text, per cost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infermix_decoders.draft_length import expected_tokens
from infermix_decoders.skipped_layers import keep_layers

Ids = Seq[Seq[int]]
#: Layers in a row that have to stay before the search gives up.
PATIENCE = 3
#: Of each tensor, for its fingerprint.
_NUMBERS = 16


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
    "Draft & Verify", search the same choice by Bayesian optimisation). The search ends behind `PATIENCE` layers in a
    row that have to stay: those that follow change more tokens still. One forward of all samples judges one choice;
    there are at most two for each layer.
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
    in_vain = 0
    for step, single in enumerate(sorted(alone, key=lambda each: -each.agreement), 1):
        if len(best.layers) == number - 1 or in_vain == PATIENCE:
            break
        tried = judge([*best.layers, *single.layers])
        in_vain = 0 if tried.speedup > best.speedup else in_vain + 1
        best = max(best, tried, key=lambda each: each.speedup)
        progress((number + step) / (2 * number))
    return best


@torch.inference_mode()
def _next_tokens(model: Any, samples: Ids) -> Tensor:
    """The most likely token after every token of the samples, those of equal length in one forward."""
    lengths = dict.fromkeys(len(sample) for sample in samples)
    found = []
    for length in lengths:
        ids = torch.tensor([sample for sample in samples if len(sample) == length], device=model.device)
        found.append(model(input_ids=ids, use_cache=False).logits.argmax(-1).flatten())
    return torch.cat(found)


def fingerprint(model: nn.Module) -> str:
    """Tells weights apart by a few numbers of every tensor: enough to find an earlier choice of layers again."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values = tensor.detach().flatten()
        few = values[:: max(1, values.numel() // _NUMBERS)][:_NUMBERS]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {few.float().cpu().tolist()}".encode())
    return digest.hexdigest()
