"""Log-probabilities from the model's own forward pass."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from infermix.roles.engine import Score, ScoreRequest

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Rows whose float32 log-softmax exists at once.
ROWS_PER_CHUNK = 512


def score_prefill(model: nn.Module, request: ScoreRequest, device: str) -> Score:
    """One pass over everything but the last token."""
    ids = torch.tensor([request.token_ids[:-1]], device=device)
    wanted = len(request.token_ids) - request.first
    keep = {"logits_to_keep": wanted} if "logits_to_keep" in _parameters(model) else {}
    logits = model(input_ids=ids, use_cache=False, **keep).logits
    return _score(logits[0, -wanted:], request)


def score_decode(model: nn.Module, request: ScoreRequest, device: str, cache: Any) -> Score:
    """The first `request.first` tokens in one pass, then one token at a time, all through `cache`."""
    keyword = "cache" if "cache" in _parameters(model) else "past_key_values"
    ids = torch.tensor([request.token_ids], device=device)
    bounds = [0, *range(request.first, ids.shape[1])]
    rows = []
    for begin, end in pairwise(bounds):
        output = model(input_ids=ids[:, begin:end], use_cache=True, **{keyword: cache})
        rows.append(output.logits[0, -1])
    return _score(torch.stack(rows), request)


def _parameters(model: nn.Module) -> Any:
    return inspect.signature(model.forward).parameters


def _score(logits: Tensor, request: ScoreRequest) -> Score:
    targets = torch.tensor(request.token_ids[request.first :], device=logits.device)
    logprobs = [
        rows.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
        for rows, ids in zip(logits.split(ROWS_PER_CHUNK), targets.split(ROWS_PER_CHUNK), strict=True)
    ]
    return Score(
        logprobs=torch.cat(logprobs).tolist(),
        top1=logits.argmax(-1).tolist(),
        logits=logits.float().cpu() if request.want_logits else None,
    )
