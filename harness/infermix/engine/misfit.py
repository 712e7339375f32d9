"""Requests that an engine can never serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infermix.errors import UserError

if TYPE_CHECKING:
    from infermix.roles.engine import EngineContext
    from infermix.roles.kv_space import KVShape, KVSpace
    from infermix.roles.request import Request


def refuse_misfit(request: Request, context: EngineContext, space: KVSpace, shape: KVShape) -> None:
    """Raises `UserError` that says what is wrong with it."""
    prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
    limit = context.max_model_len
    if prompt == 0:
        raise UserError(f"request {request.request_id!r} has an empty prompt", hint="at least one token is needed")
    if prompt + new > limit:
        raise UserError(
            f"request {request.request_id!r} needs {prompt} + {new} = {prompt + new} tokens, the engine holds "
            f"{limit} per sequence (model positions: {context.facts.max_position_embeddings})",
            hint="shorten the prompt, lower max_new_tokens, or raise limits.max_model_len",
        )
    if not space.fits(prompt + new):
        raise UserError(
            f"request {request.request_id!r} needs {prompt + new} tokens of KV, the layout holds "
            f"{shape.capacity_tokens} in all",
            hint="give the KV more memory",
        )
    out_of_range = [token for token in request.prompt_ids if not 0 <= token < context.facts.vocab_size]
    if out_of_range:
        raise UserError(
            f"request {request.request_id!r} has token id {out_of_range[0]}, "
            f"the vocabulary has {context.facts.vocab_size}"
        )
