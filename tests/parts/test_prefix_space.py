"""Shared blocks against a store of plain lists: whatever happens, every sequence reads its own tokens.

A slot of the imitated store holds all tokens up to its own, as K and V depend on all of them.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infermix.roles.kv_space import KVBudget, KVGroup, KVShape
from infermix.toolkit.block_copies import BlockCopies
from infermix.toolkit.paged_space import PagedSpace
from infermix.toolkit.prefix_index import HashIndex, encode
from infermix.toolkit.prefix_space import PrefixPagedSpace
from infermix.toolkit.radix_index import RadixIndex
from infermix_reference.kv_paged import PagedLayout

INDEXES: dict[str, Any] = {"hash": HashIndex, "hash runs": lambda size: HashIndex(size, span=2), "radix": RadixIndex}
ACTIONS = (
    "start",
    "start",
    "twins",
    "grow",
    "grow",
    "grow",
    "ahead",
    "fork",
    "truncate",
    "back",
    "end",
    "abort",
    "reset",
)


def shape_of(block_size: int, num_blocks: int) -> KVShape:
    budget = KVBudget(64, 24, 4, max_bytes=(num_blocks + 1) * block_size * 8)
    return PagedLayout(block_size).shape((KVGroup((0,), 1, 1, 1),), budget)


class Life:
    """Sequences over one space. `draw(n)` gives a number below n."""

    def __init__(self, space: Any, shape: KVShape, draw: Any) -> None:
        self.space, self.draw, self.size = space, draw, shape.block_size
        self.slots: dict[int, list[tuple[int, ...] | None]] = {b: [None] * self.size for b in range(shape.num_blocks)}
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}
        self.computed: dict[int, int] = {}
        self.past: list[list[int]] = [[]]
        self.next_id = 0
        self.hits = 0

    def step(self) -> None:
        action = ACTIONS[self.draw(len(ACTIONS))]
        if action in ("start", "twins"):
            getattr(self, action)()
        elif action == "reset":
            self.space.reset_prefixes()
        elif self.tokens:
            getattr(self, action)(sorted(self.tokens)[self.draw(len(self.tokens))])
        self.check()

    def start(self) -> None:
        seq_id = self.admit(self.past[self.draw(len(self.past))])
        if seq_id is not None:
            self.compute(seq_id, len(self.tokens[seq_id]))

    def twins(self) -> None:
        """Sequences that are let in within one step, where one may share what another is yet to compute."""
        let_in, stem = list[int](), self.past[self.draw(len(self.past))]
        for _ in range(2 + self.draw(2)):
            seq_id = self.admit(stem)
            if seq_id is None:
                break
            self.space.promise(seq_id, self.tokens[seq_id], len(self.tokens[seq_id]), self.salts[seq_id])
            let_in.append(seq_id)
            stem = self.tokens[seq_id]
        while let_in and not self.draw(4):  # the last one is pushed out again
            self.abort(let_in.pop())
        self.copy(self.space.take_copies())
        written: set[tuple[int, int]] = set()
        for seq_id in let_in:
            self.write(seq_id, len(self.tokens[seq_id]), written)
        for seq_id in let_in:
            self.publish(seq_id)

    def admit(self, stem: list[int]) -> int | None:
        """A new sequence that begins as `stem` does, with room for its prompt."""
        prompt = stem[: self.draw(len(stem) + 1)] + [self.draw(2) for _ in range(1 + self.draw(6))]
        prompt, seq_id, salt = prompt[:20], self.next_id, "ab"[self.draw(8) == 0]
        self.next_id += 1
        expected = self.space.peek(prompt, len(prompt) - 1, salt)
        hit = self.space.match(seq_id, prompt, len(prompt) - 1, salt)
        assert hit <= expected < len(prompt)
        assert hit >= expected // self.size * self.size
        self.hits += hit
        self.tokens[seq_id], self.computed[seq_id], self.salts[seq_id] = prompt, hit, salt
        if not self.space.reserve(seq_id, len(prompt)):
            self.abort(seq_id)
            return None
        return seq_id

    def grow(self, seq_id: int) -> None:
        tokens = self.tokens[seq_id]
        target = min(self.computed[seq_id] + 1 + self.draw(5), 24)
        if self.space.reserve(seq_id, target):
            tokens += [self.draw(2) for _ in range(target - len(tokens))]
            self.compute(seq_id, target)

    def ahead(self, seq_id: int) -> None:
        self.space.reserve(seq_id, min(self.computed[seq_id] + self.draw(9), 24))

    def compute(self, seq_id: int, target: int) -> None:
        self.copy(self.space.take_copies())
        self.write(seq_id, target)
        self.publish(seq_id)

    def write(self, seq_id: int, target: int, written: set[tuple[int, int]] | None = None) -> None:
        """A sequence writes blocks of its own alone, but for the promises of a step: those once, before it ends."""
        table, tokens = self.space.block_table(seq_id), self.tokens[seq_id]
        for position in range(self.computed[seq_id], target):
            block, slot = table[position // self.size], position % self.size
            if written is not None and self.space._pool.is_kept(block):
                assert (block, slot) not in written, f"block {block} is written by two"
            else:
                owners = sum(block in self.space.block_table(other) for other in self.tokens)
                assert owners == 1, f"shared block {block} is written"
                assert not self.space._pool.is_kept(block), f"published block {block} is written"
            self.slots[block][slot] = (self.salts[seq_id], *tokens[: position + 1])
            if written is not None:
                written.add((block, slot))
        self.computed[seq_id] = target

    def publish(self, seq_id: int) -> None:
        tokens = self.tokens[seq_id]
        known = len(tokens) - (self.draw(4) == 0)  # the last token may still be in flight
        self.space.register(seq_id, tokens[:known], self.computed[seq_id], self.salts[seq_id])

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        assert len({target for _, target in pairs}) == len(pairs), f"a block is written twice: {pairs}"
        read = [list(self.slots[source]) for source, _ in pairs]
        for (_, target), content in zip(pairs, read, strict=True):
            self.slots[target] = content

    def fork(self, seq_id: int) -> None:
        count = self.draw(self.computed[seq_id] + 1)
        pairs = self.space.fork(seq_id, self.next_id, count)
        if pairs is None:
            return
        self.copy(pairs)
        child, self.next_id = self.next_id, self.next_id + 1
        self.tokens[child] = self.tokens[seq_id][:count]
        self.computed[child], self.salts[child] = count, self.salts[seq_id]

    def truncate(self, seq_id: int) -> None:
        count = self.draw(self.computed[seq_id] + 1)
        self.space.truncate(seq_id, count)
        del self.tokens[seq_id][count:]
        self.computed[seq_id] = count

    def back(self, seq_id: int) -> None:
        """Cut, grow and fork again before anything is copied or computed, as within one step."""
        self.truncate(seq_id)
        self.space.reserve(seq_id, min(self.computed[seq_id] + 1, 24))
        self.fork(seq_id)

    def end(self, seq_id: int) -> None:
        self.copy(self.space.take_copies())
        self.space.register(seq_id, self.tokens[seq_id], self.computed[seq_id], self.salts[seq_id], last=True)
        self.abort(seq_id)

    def abort(self, seq_id: int) -> None:
        self.space.release(seq_id)
        self.past.append(self.tokens.pop(seq_id))
        del self.computed[seq_id], self.salts[seq_id]

    def check(self) -> None:
        pool, owners = self.space._pool, Counter[int]()
        sources = self.space._copies._source
        for seq_id, count in self.computed.items():
            table = self.space._tables.get(seq_id, ())
            owners.update(table)
            for position in range(count):
                block = table[position // self.size]
                held = self.slots[sources.get(block, block)][position % self.size]
                wanted = (self.salts[seq_id], *self.tokens[seq_id][: position + 1])
                assert held == wanted, f"sequence {seq_id} reads {held} at token {position}, not {wanted}"
        blocks = range(pool.num_blocks)
        assert all(pool.references(block) == owners[block] for block in blocks), "references do not balance"
        assert pool.num_used == len(owners)
        assert pool.num_free == pool.num_blocks - len(owners)
        idle = {block for block in blocks if pool._tickets[block]}
        assert pool.num_idle == len(idle)
        assert sorted(pool._free) == sorted({*blocks} - {*owners} - idle)
        usage = self.space.usage()
        assert 0 <= usage.used_tokens <= usage.allocated_tokens <= usage.capacity_tokens
        assert usage.reserved_tokens == sum(self.space._lengths.values())

    def finish(self) -> None:
        for seq_id in sorted(self.tokens):
            self.abort(seq_id)
        self.check()
        usage = self.space.usage()
        assert (usage.allocated_tokens, usage.used_tokens, usage.reserved_tokens) == (0, 0, 0)
        assert self.space._pool.num_free == self.space._pool.num_blocks, "blocks are lost"
        self.space.reset_prefixes()
        assert self.space._pool.num_idle == 0
        assert not self.space._pool._kept
        assert not self.space.peek(self.past[-1] * 3, 20)


def live(space: Any, shape: KVShape, draw: Any, steps: int) -> Life:
    life = Life(space, shape, draw)
    for _ in range(steps):
        life.step()
    life.finish()
    return life


@pytest.mark.parametrize("kind", list(INDEXES))
@settings(max_examples=80, deadline=None)
@given(block_size=st.integers(1, 5), spare=st.integers(0, 14), data=st.data())
def test_every_sequence_reads_its_own_tokens(kind: str, block_size: int, spare: int, data: Any) -> None:
    shape = shape_of(block_size, -(-24 // block_size) + spare)
    space = PrefixPagedSpace(shape, INDEXES[kind](block_size))
    live(space, shape, lambda n: data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, 40)))


def walk(space: Any, shape: KVShape, seed: int) -> Life:
    return live(space, shape, random.Random(seed).randrange, 300)


@pytest.mark.parametrize("kind", list(INDEXES))
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_long_lives_hit_evict_and_copy(kind: str, block_size: int) -> None:
    hits = evicted = copied = 0
    for seed in range(4):
        shape = shape_of(block_size, -(-24 // block_size) + 4 * seed)
        space = PrefixPagedSpace(shape, INDEXES[kind](block_size))
        hits += walk(space, shape, seed).hits
        evicted += space.counters()["prefix_evicted_blocks"]
        copied += space.counters()["kv_copied_blocks"]
    assert hits > 100
    assert evicted > 50
    assert copied > 5 or block_size == 1


class SharesThePartialBlock(PrefixPagedSpace):
    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> Any:
        pairs = super().fork(parent_id, child_id, num_tokens)
        if pairs and self._lengths[child_id] % self._block_size:
            own = self._tables[child_id][-1]
            self._tables[child_id][-1] = self._tables[parent_id][self._lengths[child_id] // self._block_size]
            self._pool.incref(self._tables[child_id][-1:])
            self._pool.release((own,))
            return []
        return pairs


class WritesAfterACut(PrefixPagedSpace):
    def truncate(self, seq_id: int, num_tokens: int) -> None:
        super().truncate(seq_id, num_tokens)
        if seq_id in self._cut:
            self._num_unused += self._block_size * len(self._tables[seq_id]) - num_tokens
            self._cut.discard(seq_id)


class EvictsTheNewestFirst(PrefixPagedSpace):
    def release(self, seq_id: int) -> None:
        super().release(seq_id)
        self._pool._order.reverse()


class ForgetsToCount(PrefixPagedSpace):
    def match(self, seq_id: int, token_ids: Any, max_tokens: int, salt: str = "") -> int:
        hit = super().match(seq_id, token_ids, max_tokens, salt)
        for block in self._tables.get(seq_id, ())[:1]:
            self._pool._references[block] = max(1, self._pool._references[block] - 1)
        return hit


class PublishesTooMuch(PrefixPagedSpace):
    def register(self, seq_id: int, token_ids: Any, num_computed: int, salt: str = "", last: bool = False) -> None:
        ahead = min(self._lengths.get(seq_id, 0), num_computed + 2)
        super().register(seq_id, [*token_ids, 1, 1, 1][: max(ahead, 0)], ahead, salt, last)


class LosesABlock(PrefixPagedSpace):
    def release(self, seq_id: int) -> None:
        if len(self._tables.get(seq_id, ())) > 2:
            self._num_unused -= self._tail(seq_id)
            del self._tables[seq_id][1:2]
            self._num_unused += self._tail(seq_id)
        super().release(seq_id)


class CopiesPromises(PrefixPagedSpace):
    """A block is copied before it is written."""

    def promise(self, seq_id: int, token_ids: Any, num_tokens: int, salt: str = "") -> None:
        super().promise(seq_id, token_ids, num_tokens, salt)
        self._promised.clear()


class BreaksPromises(PrefixPagedSpace):
    """What a sequence promised stays published though it was never written."""

    def _take_back(self, seq_id: int) -> None:
        pass


class MixesSalts(PrefixPagedSpace):
    def match(self, seq_id: int, token_ids: Any, max_tokens: int, salt: str = "") -> int:
        return super().match(seq_id, token_ids, max_tokens, "a")

    def peek(self, token_ids: Any, max_tokens: int, salt: str = "") -> int:
        return super().peek(token_ids, max_tokens, "a")


class KeepsTheCount(PrefixPagedSpace):
    def truncate(self, seq_id: int, num_tokens: int) -> None:
        PagedSpace.truncate(self, seq_id, num_tokens)


class CopiesChains(PrefixPagedSpace):
    """A target that is copied from before it is written."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)

        class Chained(BlockCopies):
            def book(self, source: int, target: int) -> None:
                self._source[target] = source
                self.num_booked += 1

        self._copies = Chained()


MUTANTS = [
    SharesThePartialBlock, WritesAfterACut, EvictsTheNewestFirst, ForgetsToCount, PublishesTooMuch, LosesABlock,
    MixesSalts, KeepsTheCount, CopiesChains, BreaksPromises,
]  # fmt: skip


@pytest.mark.parametrize("kind", list(INDEXES))
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: type[PrefixPagedSpace], kind: str) -> None:
    with pytest.raises((AssertionError, KeyError, IndexError)):
        walks(mutant, INDEXES[kind])


def walks(space: type[PrefixPagedSpace], index: Any) -> None:
    for seed in range(60):
        shape = shape_of(3, 8 + seed % 12)
        walk(space(shape, index(3)), shape, seed)


class KeepsRuns(HashIndex):
    """A run is found after its last block was evicted."""

    def evict(self, block: int) -> None:
        self._of_block[block].span = None
        super().evict(block)


class TurnsRunsAround(HashIndex):
    def _enter_span(self, last: Any) -> None:
        super()._enter_span(last)
        start, key = last.span
        start.spans[key][0].reverse()


def test_copies_of_promises_are_caught() -> None:
    with pytest.raises(AssertionError, match="reads"):
        walks(CopiesPromises, INDEXES["radix"])


@pytest.mark.parametrize("mutant", [KeepsRuns, TurnsRunsAround])
def test_mutants_of_runs_are_caught(mutant: type[HashIndex]) -> None:
    with pytest.raises((AssertionError, KeyError, IndexError)):
        walks(PrefixPagedSpace, lambda size: mutant(size, span=2))


class TestIndexes:
    def test_hash_finds_full_blocks_and_radix_every_token(self) -> None:
        tokens = list(range(100, 110))
        for index, num_tail in ((HashIndex(4), 0), (RadixIndex(4), 2)):
            index.insert(None, encode(tokens[:8]), [5, 6], "")
            found = index.find(encode([*tokens[:6], 7, 7]), "")
            assert (list(found.blocks), found.num_tail, found.tail) == ([5], num_tail, 6 if num_tail else -1)
            assert list(index.find(encode(tokens), "other").blocks) == []

    def test_what_is_published_already_stands_for_the_same_tokens(self) -> None:
        tokens = encode(list(range(12)))
        for index in (HashIndex(4), RadixIndex(4)):
            assert index.insert(None, tokens[:32], [5, 6], "") == [5, 6]
            assert index.insert(None, tokens, [1, 2, 3], "") == [5, 6, 3]
            assert index.insert(6, tokens[32:], [9], "") == [3]
            assert list(index.find(tokens, "").blocks) == [5, 6, 3]

    def test_an_edge_splits_between_blocks(self) -> None:
        index = RadixIndex(2)
        index.insert(None, encode([1, 2, 3, 4, 5, 6]), [0, 1, 2], "")
        index.insert(None, encode([1, 2, 3, 9]), [7, 8], "")
        assert list(index.find(encode([1, 2, 3, 4, 5, 6]), "").blocks) == [0, 1, 2]
        assert list(index.find(encode([1, 2, 3, 9]), "").blocks) == [0, 8]
        found = index.find(encode([1, 2, 3]), "")
        assert (list(found.blocks), found.num_tail) == ([0], 1)
        assert found.tail in (1, 8)

    def test_a_tail_that_others_begin_with_is_not_kept(self) -> None:
        index = RadixIndex(4)
        index.insert(None, encode([1, 2, 3, 4]), [0], "")
        assert index.insert(None, encode([1, 2]), [1], "") == [-1]
        assert index.insert(None, encode([1, 7]), [2], "") == [2]
        found = index.find(encode([1, 7, 7]), "")
        assert (found.tail, found.num_tail) == (2, 2)

    @pytest.mark.parametrize("index", [HashIndex(2), RadixIndex(2)], ids=["hash", "radix"])
    def test_nothing_is_evicted_before_what_follows_it(self, index: Any) -> None:
        index.insert(None, encode([1, 2, 3, 4]), [0, 1], "")
        index.insert(None, encode([1, 2, 5, 6]), [0, 2], "")
        with pytest.raises(AssertionError, match="block 0"):
            index.evict(0)
