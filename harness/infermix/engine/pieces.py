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
    """Hand all but the last pieces, of at most `limit` new tokens each, to `run`; yields the entries with the rest.

    Drafts stay together, behind the last own token. While the context is open, `num_computed` of a cut sequence
    counts what has run; afterwards it is as before.
    """
    before = [(entry.sequence, entry.sequence.num_computed) for entry in entries]
    rest = list(entries)
    try:
        while any(entry.num_new_tokens > limit for entry in rest):
            cuts = [_piece(entry, limit) for entry in rest]
            run([Scheduled(entry.sequence, cut) for entry, cut in zip(rest, cuts, strict=True) if cut])
            for entry, cut in zip(rest, cuts, strict=True):
                entry.sequence.num_computed += cut
            rest = [_without(entry, cut) if cut else entry for entry, cut in zip(rest, cuts, strict=True)]
        yield rest
    finally:
        for sequence, num_computed in before:
            sequence.num_computed = num_computed


def _piece(entry: Scheduled, limit: int) -> int:
    """New tokens that run before the rest of the entry; 0 where all of it fits into one forward."""
    if entry.num_new_tokens <= limit:
        return 0
    if not entry.draft_ids:
        return limit
    own_before_last = entry.num_new_tokens - len(entry.draft_ids) - 1
    assert own_before_last, "a verification row is longer than the layout takes"
    return min(limit, own_before_last)


def _without(entry: Scheduled, num_done: int) -> Scheduled:
    return replace(entry, num_new_tokens=entry.num_new_tokens - num_done)
