"""What a repeat produced: the first texts for the record, and figures that show degenerate outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infermix.protocol import OutputFigures
from infermix.record.record import OutputSample, Repeat, RequestSample

if TYPE_CHECKING:
    from infermix.roles.engine import Tokenizer
    from infermix.roles.request import Request

#: Requests whose outputs are kept in the record.
KEPT = 4
_MAX_TOKENS = 128
_MAX_CHARACTERS = 600
#: Shorter outputs may repeat a token by chance.
_MIN_REPEATED = 8


def figures(repeat: Repeat, requests: Sequence[Request]) -> OutputFigures:
    """Count outputs that cannot be meant: empty ones, long ones of a single token. Failed requests are left out."""
    asked = {request.request_id for request in requests if request.sampling.max_new_tokens > 0}
    ended = [sample for sample in repeat.requests if not sample.error]
    outputs = [output for sample in ended for output in sample.outputs]
    seen = {token for output in outputs for token in output.output_ids}
    return OutputFigures(
        outputs=len(outputs),
        degenerate=sum(map(_repeats_one_token, outputs)),
        empty=sum(
            sample.request_id in asked and not output.output_ids for sample in ended for output in sample.outputs
        ),
        single_token=seen.pop() if len(seen) == 1 and any(map(_repeats_one_token, outputs)) else None,
    )


def _repeats_one_token(output: RequestSample | OutputSample) -> bool:
    return len(output.output_ids) >= _MIN_REPEATED and len(set(output.output_ids)) == 1


def drop_ids(repeat: Repeat) -> None:
    """Forget the ids of all but the first requests: records stay small."""
    for sample in repeat.requests[KEPT:]:
        for output in sample.outputs:
            output.output_ids = []


def first_outputs(repeat: Repeat, requests: Sequence[Request], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """The first few requests with what came back; texts where there is a tokenizer, both ends bounded."""
    prompts = {request.request_id: request.prompt_ids for request in requests}
    return [_output(sample, prompts[sample.request_id], tokenizer) for sample in repeat.requests[:KEPT]]


def _output(sample: RequestSample, prompt: Sequence[int], tokenizer: Tokenizer | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "request_id": sample.request_id,
        "input_tokens": sample.input_tokens,
        **_generated(sample, tokenizer),
    }
    if tokenizer is not None:
        entry["prompt"] = tokenizer.decode(prompt[-_MAX_TOKENS:])[-_MAX_CHARACTERS:]
    if sample.more_outputs:
        entry["more_outputs"] = [_generated(output, tokenizer) for output in sample.more_outputs]
    return entry


def _generated(output: RequestSample | OutputSample, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = {} if tokenizer is None else {"text": tokenizer.decode(output.output_ids)[:_MAX_CHARACTERS]}
    return {
        "output_tokens": len(output.output_ids),
        "finish_reason": output.finish_reason,
        "token_ids": output.output_ids[:_MAX_TOKENS],
        **text,
    }
