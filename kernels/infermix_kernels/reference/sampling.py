"""What greedy choice and filtered sampling mean, in plain PyTorch: a full sort, probabilities in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """Ids `[R]` of the largest logit of each row; the first one where several are equal."""
    return (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)


def filtered_probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """fp64 `[R, V]`, not renormalised, 0 for what the filters drop; every parameter is `[R]`."""
    scaled = logits.float() / temperature.float()[:, None]
    ordered, index = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    beyond = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probabilities = torch.softmax(ordered.masked_fill(beyond, float("-inf")), dim=-1, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    drop = ((before >= top_p[:, None]) & (top_p[:, None] < 1)) | (
        probabilities < min_p[:, None] * probabilities[:, :1]
    )
    drop[:, 0] = False
    return torch.zeros_like(probabilities).scatter_(1, index, probabilities.masked_fill(drop, 0.0))


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, noise: Tensor) -> Tensor:
    """One token per row: the first id at which the kept mass, in id order, exceeds `noise` of the whole."""
    sharp = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    cumulative = filtered_probabilities(logits, sharp, top_k, top_p, min_p).cumsum(-1)
    drawn = (cumulative <= noise.double()[:, None] * cumulative[:, -1:]).sum(-1)
    return torch.where(temperature > 0, drawn, greedy(logits))
