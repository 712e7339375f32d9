"""What both schedulers ask before they let a request in."""

from __future__ import annotations

from collections.abc import MutableMapping

from infermix.errors import UserError
from infermix.roles.kv_space import KVSpace
from infermix.roles.request import Sequence


def longest_context(sequence: Sequence) -> int:
    """Most tokens whose K and V are stored at once: the last sampled token is never computed."""
    return sequence.num_prompt_tokens + max(sequence.request.sampling.max_new_tokens - 1, 0)


def refuse_oversized(sequence: Sequence, space: KVSpace, waiting: MutableMapping[int, Sequence]) -> None:
    """Raises `UserError`, and takes the sequence out of `waiting`, when an empty space would not hold it."""
    needed = longest_context(sequence)
    if space.fits(needed):
        return
    waiting.pop(sequence.seq_id)
    sampling = sequence.request.sampling
    raise UserError(
        f"request {sequence.request.request_id!r} needs KV for {needed} tokens ({sequence.num_prompt_tokens} of "
        f"the prompt, {sampling.max_new_tokens} new), more than the KV memory ever holds",
        hint="raise limits.max_model_len or limits.kv_memory_bytes, or shorten the request",
    )
