"""What schedulers ask before they let a request in."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from infermix.errors import UserError
from infermix.roles.kv_space import KVSpace
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Scheduled


def longest_context(sequence: Sequence) -> int:
    """Most tokens whose K and V are stored at once: the last sampled token is never computed."""
    return sequence.num_prompt_tokens + max(sequence.request.sampling.max_new_tokens - 1, 0)


def refuse_oversized(sequence: Sequence, space: KVSpace, withdraw: Callable[[Sequence], object]) -> None:
    """Raises `UserError`, after `withdraw` took the sequence back, when an empty space would not hold it."""
    needed = longest_context(sequence)
    if space.fits(needed):
        return
    withdraw(sequence)
    sampling = sequence.request.sampling
    raise UserError(
        f"request {sequence.request.request_id!r} needs KV for {needed} tokens ({sequence.num_prompt_tokens} of "
        f"the prompt, {sampling.max_new_tokens} new), more than the KV memory ever holds",
        hint="raise limits.max_model_len or limits.kv_memory_bytes, or shorten the request",
    )


def start_cached(sequence: Sequence, space: KVSpace) -> None:
    """Let a sequence that holds nothing begin behind its longest cached prefix.

    `num_computed` is then what need not be computed, and as much is reserved. Call it before asking how many new
    tokens the sequence has; if it is not let in after all, call `give_back`. Does nothing where the space has no
    prefix cache, and for a sequence that holds KV already.
    """
    match = getattr(space, "match", None)
    if match is None or sequence.num_computed:
        return
    known = min(len(sequence.tokens), sequence.num_tokens - 1)
    sequence.num_cached = match(sequence.seq_id, sequence.tokens, known, sequence.request.cache_salt)
    sequence.num_computed = sequence.num_cached


def promise_prefix(sequence: Sequence, num_new_tokens: int, space: KVSpace) -> None:
    """The sequence is planned with so many new tokens: let those that come after it in this step share them.

    For sequences that nothing can push out of the plan again. Does nothing where the space has no prefix cache.
    """
    promise = getattr(space, "promise", None)
    if promise is not None:
        salt = sequence.request.cache_salt
        promise(sequence.seq_id, sequence.tokens, sequence.num_computed + num_new_tokens, salt)


def give_back(sequence: Sequence, space: KVSpace) -> None:
    """The sequence goes on waiting: it must not hold blocks that those who run may need."""
    if sequence.num_computed:
        space.release(sequence.seq_id)
        sequence.num_computed = sequence.num_cached = 0


def reserve_next(space: KVSpace, entries: Many[Scheduled]) -> int:
    """Room for the next token of each entry's sequence, in order; returns how many got it before there was none."""
    ask = getattr(space, "reserve_next", None)
    if ask is not None:
        return ask(entries)
    for count, entry in enumerate(entries):
        if not space.reserve(entry.sequence.seq_id, entry.sequence.num_computed + 1):
            return count
    return len(entries)


def steps_for(space: KVSpace, num_seqs: int) -> int:
    """For how many steps `num_seqs` sequences surely get one token more each; 0 where the space cannot tell."""
    ask = getattr(space, "steps_for", None)
    return ask(num_seqs) if ask is not None and not space.recompute else 0
