"""Log-probabilities from vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infermix.errors import InfermixError, Unsupported, UserError
from infermix.roles.engine import Score, ScoreRequest


def check_score(request: ScoreRequest, max_model_len: int) -> None:
    """Raises `Unsupported` for what vLLM cannot tell, `UserError` for a sequence that does not fit.

    vLLM wants room for one token after the prompt, so a sequence may have `max_model_len - 1` tokens.
    """
    if request.protocol != "prefill":
        raise Unsupported(f"vLLM scores a prompt in one pass, not under the protocol {request.protocol!r}")
    if request.want_logits:
        raise Unsupported("vLLM gives log-probabilities of tokens, not logits")
    num_tokens = len(request.token_ids)
    if not 1 <= request.first < num_tokens or num_tokens >= max_model_len:
        raise UserError(
            f"cannot score tokens {request.first} to {num_tokens} of a sequence of {num_tokens}",
            hint=f"at least one token must come first; vLLM scores at most {max_model_len - 1} tokens",
        )


def read_score(request: ScoreRequest, prompt_logprobs: Sequence[Mapping[int, Any] | None] | None) -> Score:
    """`prompt_logprobs[i]` maps token id -> entry (`logprob`, `rank`): token i itself and the likeliest one."""
    if prompt_logprobs is None or len(prompt_logprobs) != len(request.token_ids):
        found = "no" if prompt_logprobs is None else str(len(prompt_logprobs))
        raise InfermixError(f"vLLM gave {found} log-probabilities for {len(request.token_ids)} tokens")
    logprobs, top1 = [], []
    for token, entries in zip(request.token_ids[request.first :], prompt_logprobs[request.first :], strict=True):
        if entries is None or token not in entries:
            raise InfermixError(f"vLLM gave no log-probability for token {token}")
        logprobs.append(float(entries[token].logprob))
        top1.append(max(entries, key=lambda each: float(entries[each].logprob)))
    return Score(logprobs=logprobs, top1=top1)
