"""A paged space that keeps the blocks of ended sequences and serves new ones from them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from infermix.roles.kv_space import KVShape
from infermix.toolkit.paged_space import PagedSpace
from infermix.toolkit.prefix_index import TOKEN_BYTES, Found, PrefixIndex, encode


class PrefixPagedSpace(PagedSpace):
    """Prefix caching over `PagedSpace` (`roles.kv_prefix.PrefixSpace`).

    The first `published` blocks of a sequence are those of the index, so whoever owns a published block owns all that
    come before it. Idle blocks are evicted by least recent use, the end of a sequence before its beginning; together
    this means that nothing is evicted before what follows it.
    """

    def __init__(self, shape: KVShape, index: PrefixIndex, *, keep_between_repeats: bool = False) -> None:
        super().__init__(shape, index.evict)
        self._index, self.keeps_prefixes = index, keep_between_repeats
        self._published: dict[int, int] = {}
        #: Published blocks that the step which is being planned will write.
        self._promised: set[int] = set()

    def match(self, seq_id: int, token_ids: Sequence[int], max_tokens: int, salt: str = "") -> int:
        assert seq_id not in self._tables, f"sequence {seq_id} already holds blocks"
        found = self._find(token_ids, max_tokens, salt)
        if not found.blocks and not found.num_tail:
            return 0
        self._pool.incref(found.blocks)
        table, num_full = found.blocks, len(found.blocks)
        num_tokens = num_full * self._block_size
        if found.num_tail and (own := self._copy_of(found.tail)) is not None:
            table.append(own)
            num_tokens += found.num_tail
        if not num_tokens:
            return 0
        self._published[seq_id] = num_full
        self._begin(seq_id, table, num_tokens)
        return num_tokens

    def peek(self, token_ids: Sequence[int], max_tokens: int, salt: str = "") -> int:
        found = self._find(token_ids, max_tokens, salt)
        return len(found.blocks) * self._block_size + found.num_tail

    def promise(self, seq_id: int, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> None:
        table, size, done = self._tables[seq_id], self._block_size, self._published.get(seq_id, 0)
        full = min(num_tokens, len(token_ids)) // size
        if full <= done:
            return
        own, before = table[done:full], table[done - 1] if done else None
        data, width = encode(token_ids[done * size : full * size]), size * TOKEN_BYTES
        if self._index.insert(before, data[:width], own[:1], salt)[0] != own[0]:
            return
        self._index.insert(own[0], data[width:], own[1:], salt)
        self._pool.keep(own)
        self._promised.update(own)
        self._published[seq_id] = full

    def take_copies(self) -> list[tuple[int, int]]:
        self._promised.clear()
        return super().take_copies()

    def register(
        self, seq_id: int, token_ids: Sequence[int], num_computed: int, salt: str = "", last: bool = False
    ) -> None:
        known = min(num_computed, len(token_ids))
        done = self._published.get(seq_id, 0)
        full, partial = divmod(known, self._block_size)
        if seq_id not in self._tables:
            return
        with_tail = last and partial and self._index.keeps_tails and not self._is_shared(self._tables[seq_id][full])
        if full + bool(with_tail) > done:
            stop = known if with_tail else full * self._block_size
            data = encode(token_ids[done * self._block_size : stop])
            self._publish(seq_id, done, full + bool(with_tail), data, salt)
            self._published[seq_id] = full

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        super().truncate(seq_id, num_tokens)
        if seq_id in self._published:
            self._published[seq_id] = min(self._published[seq_id], num_tokens // self._block_size)

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        pairs = super().fork(parent_id, child_id, num_tokens)
        if pairs is not None:
            shared = self._lengths[child_id] // self._block_size
            self._published[child_id] = min(self._published.get(parent_id, 0), shared)
        return pairs

    def release(self, seq_id: int) -> None:
        if self._promised:
            self._take_back(seq_id)
        super().release(seq_id)
        self._published.pop(seq_id, None)

    def reset_prefixes(self) -> None:
        if not self.keeps_prefixes:
            self._pool.drop_idle()

    def counters(self) -> dict[str, float]:
        return {**super().counters(), "prefix_evicted_blocks": float(self._pool.num_evicted)}

    def reset_counters(self) -> None:
        super().reset_counters()
        self._pool.num_evicted = 0

    def _find(self, token_ids: Sequence[int], max_tokens: int, salt: str) -> Found:
        found = self._index.find(encode(token_ids, max_tokens), salt)
        if found.tail in self._promised:  # there is nothing yet that could be copied
            found.tail, found.num_tail = -1, 0
        return found

    def _take_back(self, seq_id: int) -> None:
        """Forget what the sequence promised; who shares it is last to leave."""
        for block in reversed(self._tables.get(seq_id, ())):
            if block in self._promised and self._pool.references(block) == 1:
                self._promised.discard(block)
                self._pool.forget(block)

    def _copy_of(self, block: int) -> int | None:
        """A block of one's own that is to hold what `block` holds; `None` when there is no room."""
        self._pool.touch(block)
        own = self._pool.allocate(1)
        if own is None:
            return None
        if own[0] != block:  # it was the last idle one, and holds its content still
            self._copies.book(block, own[0])
        return own[0]

    def _publish(self, seq_id: int, start: int, stop: int, data: bytes, salt: str) -> None:
        table = self._tables[seq_id]
        before = table[start - 1] if start else None
        offered = table[start:stop]
        kept = self._index.insert(before, data, offered, salt)
        self._pool.keep([own for own, block in zip(offered, kept, strict=True) if own == block])
        for place, (own, block) in enumerate(zip(offered, kept, strict=True), start):
            if own != block >= 0:
                self._pool.incref((block,))
                table[place] = block
                self._give_back((own,))
