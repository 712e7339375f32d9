"""Requests in vLLM's terms, and what is refused because vLLM would read it differently."""

from __future__ import annotations

from typing import Any

from infermix.errors import UserError
from infermix.roles.request import Request, SamplingParams
from infermix.toolkit.sampling import stop_tokens

from infermix_vllm.api import Api

#: Outside these vLLM refuses a temperature, or raises it to the lower bound with a warning only.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
#: vLLM keeps seeds as signed 64-bit integers and reads -1 as none.
_SEED_MASK = 2**63 - 1


def check_request(request: Request, *, max_model_len: int, vocab_size: int, has_tokenizer: bool) -> None:
    """Raises `UserError` for what vLLM would refuse less clearly, change, or (token ids) not check at all."""
    sampling, where = request.sampling, f"request {request.request_id}"
    prompt, new = len(request.prompt_ids), sampling.max_new_tokens
    if not prompt:
        raise UserError("the prompt is empty", where=where, hint="at least one token is needed")
    if prompt + new > max_model_len:
        raise UserError(
            f"{prompt} prompt tokens and {new} new ones exceed the {max_model_len} tokens of a sequence",
            where=where,
            hint="shorten the prompt, lower max_new_tokens, or raise limits.max_model_len",
        )
    foreign = next((token for token in request.prompt_ids if not 0 <= token < vocab_size), None)
    if foreign is not None:
        raise UserError(f"token id {foreign} is not in the vocabulary of {vocab_size}", where=where)
    if sampling.stop and not has_tokenizer:
        raise UserError("stop strings need a tokenizer", where=where, hint="use stop_token_ids instead")
    _check_sampling(sampling, where)


def _check_sampling(sampling: SamplingParams, where: str) -> None:
    if sampling.max_new_tokens < 1:
        raise UserError("vLLM makes at least one token", where=where, hint="set max_new_tokens to 1 or more")
    if sampling.temperature and not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
        raise UserError(
            f"vLLM does not sample at temperature {sampling.temperature:g}",
            where=where,
            hint=f"0 is greedy, otherwise {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
        )
    if sampling.ignore_eos and sampling.min_new_tokens and sampling.stop_token_ids:
        raise UserError(
            "with ignore_eos and stop_token_ids, vLLM holds back end-of-text tokens too until min_new_tokens",
            where=where,
            hint="leave min_new_tokens out",
        )


def to_vllm(api: Api, sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> Any:
    """`vllm.SamplingParams` that streams new token ids. Stop strings stay with us: vLLM has no tokenizer here.

    A seed fixes the draw of one request, but not the same draw as in another engine.
    """
    stops = sorted(stop_tokens(sampling, eos_token_ids))
    drawn: dict[str, Any] = {"temperature": 0.0}
    if sampling.temperature:
        drawn = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": sampling.seed & _SEED_MASK,
        }
    return api.sampling_params(
        max_tokens=sampling.max_new_tokens,
        # Without a stop token there is nothing to hold back, and vLLM would hold back the end of text.
        min_tokens=sampling.min_new_tokens if stops else 0,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=stops,
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
        output_kind=api.output_kind.DELTA,
        **drawn,
    )


def scoring_params(api: Api) -> Any:
    """One forward over the prompt, with the log-probability of every token of it and of the most likely one."""
    return api.sampling_params(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=1,
        ignore_eos=True,
        detokenize=False,
        output_kind=api.output_kind.FINAL_ONLY,
    )
