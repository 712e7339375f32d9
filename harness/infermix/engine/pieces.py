"""Prompts that are longer than a layout takes in one forward, run piece by piece.

A ring of blocks holds a window and one piece: more new tokens at once would overwrite keys that the first of them
still need. The scheduler knows nothing of it; one scheduled step becomes several forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from infermix.roles.scheduler import Scheduled


@contextmanager
def last_pieces(
    entries: Sequence[Scheduled], limit: int, run: Callable[[list[Scheduled]], object]
) -> Iterator[list[Scheduled]]:
    """Hand all but the last pieces, of `limit` new tokens each, to `run`; yields the entries with what is left.

    While the context is open, `num_computed` of a cut sequence counts what has run; afterwards it is as before.
    """
    before = [(entry.sequence, entry.sequence.num_computed) for entry in entries]
    rest = list(entries)
    try:
        while long := [entry for entry in rest if entry.num_new_tokens > limit]:
            assert not any(entry.draft_ids for entry in long), "a verification row is longer than the layout takes"
            run([Scheduled(entry.sequence, limit) for entry in long])
            for entry in long:
                entry.sequence.num_computed += limit
            rest = [_without(entry, limit) if entry.num_new_tokens > limit else entry for entry in rest]
        yield rest
    finally:
        for sequence, num_computed in before:
            sequence.num_computed = num_computed


def _without(entry: Scheduled, num_done: int) -> Scheduled:
    return replace(entry, num_new_tokens=entry.num_new_tokens - num_done)
