"""What a KV space may offer beyond `KVSpace`: copies of shared blocks, and prefixes that outlive their sequences.

Whoever uses it asks with `getattr`, once: a space without a method does without. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from infermix.roles.kv_space import KVSpace


class SharingSpace(KVSpace, Protocol):
    """A space whose sequences share blocks: copy-on-write.

    A block with several owners, or published in a prefix cache, is never written. `truncate` may leave a sequence
    with such a block as its partly kept last one; the next `reserve` replaces it and books a copy.
    """

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, target) block copies that were booked since the last call.

        They are for `KVStore.copy`, all sources being read before any target is written, before anything else
        changes the store: the runner asks before every forward. What `fork` returns includes them.
        """
        ...


class PrefixSpace(SharingSpace, Protocol):
    """A space that serves the first tokens of a new sequence from what earlier ones computed; provides `kv:prefix`.

    A layout with several block tables or states answers with the smallest number of tokens that every one of them can
    serve, and attaches exactly that many in each. Only sequences with the same `salt` (an adapter, a tenant) share;
    the model is the same for all, since a space belongs to one engine.
    """

    #: Whether `reset_prefixes` keeps them, because the experiment says so.
    keeps_prefixes: bool

    def match(self, seq_id: int, token_ids: Sequence[int], max_tokens: int, salt: str = "") -> int:
        """Give a sequence that holds nothing its longest cached prefix of at most `max_tokens` tokens.

        Returns how many tokens need not be computed; they are then reserved, as by `reserve`. `max_tokens` leaves out
        at least the last known token, without which there would be no logits.
        """
        ...

    def peek(self, token_ids: Sequence[int], max_tokens: int, salt: str = "") -> int:
        """What `match` would return, without attaching anything: for schedulers that order by it."""
        ...

    def promise(self, seq_id: int, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> None:
        """Publish full blocks of the first `num_tokens` tokens, which the step that is being planned will compute.

        What is let in later in the same step shares them: one forward writes K and V of a layer before any of it is
        read. Nobody copies from them before that (`take_copies`), and a sequence that is released before takes its
        promise back. Blocks that others have published stay theirs, for `register` to replace.
        """
        ...

    def register(
        self, seq_id: int, token_ids: Sequence[int], num_computed: int, salt: str = "", last: bool = False
    ) -> None:
        """Publish what the sequence computed: full blocks of its first `num_computed` tokens, as far as their ids are
        in `token_ids`.

        The engine says so after the launch that computes them (device order makes later launches read what was
        written) and, with `last`, when the sequence ends and writes nothing more: a partly filled last block may then
        be published as well. Cheap when nothing is new. The block table may change: where another sequence published
        the same tokens before, its blocks take the place of these.
        """
        ...

    def reset_prefixes(self) -> None:
        """Forget every cached prefix, unless the layout was told to keep them between repeats."""
        ...
