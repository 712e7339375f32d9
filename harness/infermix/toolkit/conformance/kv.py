"""Conformance of KV layouts: a random life of sequences against plain lists of tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from infermix.errors import Unsupported, UserError
from infermix.roles.attention import LayerSpec
from infermix.roles.batch import Batch
from infermix.roles.component import Component
from infermix.roles.kv_space import KVBudget, KVGroup, KVLayout, KVShape
from infermix.toolkit.conformance.batches import make_batch, next_token
from infermix.toolkit.conformance.component import example_machine, example_model, machine_for
from infermix.toolkit.conformance.kv_move import check_kv_move
from infermix.toolkit.conformance.kv_swap import check_kv_swap

#: Two groups of different shape and window, keys wider than values in the second.
GROUPS = (KVGroup((0, 2), 2, 8, 8), KVGroup((1,), 1, 12, 4, window=5))
#: For layouts that take nothing but windows (`kv:windows_only`).
WINDOWS = (KVGroup((0, 2), 2, 8, 8, window=3), KVGroup((1,), 1, 12, 4, window=5))
#: The same of a latent layout: values are the first numbers of keys.
LATENT_GROUPS = (KVGroup((0, 2), 1, 12, 8, shared_values=True), KVGroup((1,), 1, 10, 4, 5, shared_values=True))
BUDGET = KVBudget(max_num_seqs=4, max_model_len=40, element_bytes=4, max_query_len=11)
#: The same for layouts that refuse so narrow heads, and sequences long enough for what these keep apart at first.
WIDE_GROUPS = tuple(replace(group, key_dim=8 * group.key_dim, value_dim=8 * group.value_dim) for group in GROUPS)
WIDE_BUDGET = replace(BUDGET, max_model_len=400)
#: A single read may be this many times as far off as the stated error, which is that of many numbers together.
_READ_FACTOR = 3


def check_kv_layout(
    component: Component, options: Any = None, *, steps: int = 60, seed: int = 0, device: str | None = None
) -> None:
    """Sizes, bytes, and a random walk of reserve, write, view, truncate, fork, release over both halves.

    Where the layout provides `kv:prefix`, sequences also `match` and `register`.

    A group whose blocks are a ring must give back what the new tokens see of its window. A layout that drops tokens
    must hold as many as it says, each of them one of the sequence, in order, the new ones last. One that states a
    `kv_error` must give back what was written within it, any other exactly that. The store is on
    `device`, by default on CUDA where there is one and the layout takes it.
    """
    options = component.options() if options is None else options
    layout: KVLayout = component.build(options, None)
    device = machine_for(component, options).device if device is None else device
    provided = component.provides(options, example_model(), example_machine(device))
    shape = _shape(layout, provided)
    _check_sizes(layout, shape, provided, device, lossless=component.lossless(options))
    life_of: type[KVLife] = KVLife
    if "kv:prefix" in provided:
        from infermix.toolkit.conformance.kv_prefix import PrefixLife

        life_of = PrefixLife
    life = life_of(layout, shape, provided, random.Random(seed), device, component.kv_error(options))
    for _ in range(steps):
        life.step()
    life.end()
    _check_full(layout, shape)
    if "kv:swap" in provided:
        check_kv_swap(layout, shape, device)
    if "kv:move" in provided:
        check_kv_move(KVLife(layout, shape, provided, random.Random(seed), device, component.kv_error(options)))


def _shape(layout: KVLayout, provided: frozenset[str]) -> KVShape:
    if getattr(layout, "form", "expanded") == "latent":
        return layout.shape(LATENT_GROUPS, BUDGET)
    try:
        return layout.shape(WINDOWS if "kv:windows_only" in provided else GROUPS, BUDGET)
    except UserError:
        return layout.shape(WIDE_GROUPS, WIDE_BUDGET)


def _check_sizes(layout: KVLayout, shape: KVShape, provided: frozenset[str], device: str, *, lossless: bool) -> None:
    full = sum(group.bytes_per_token(BUDGET.element_bytes) for group in shape.groups)
    expected = shape.bytes_per_token in (0, full) if lossless else shape.bytes_per_token > 0
    assert expected, f"{shape.bytes_per_token} bytes a token, {full} in full"
    store = layout.store(shape, device, torch.float32)
    held = store.allocated_bytes()
    if "kv:preallocated" in provided:
        assert held == shape.bytes, f"the shape says {shape.bytes} bytes, the store holds {held}"
        blocks = sum(
            (shape.blocks_of(shape.table_of(index)) + 1) * shape.bytes_of_slots((group,))
            for index, group in enumerate(shape.groups)
        )
        apart = (shape.max_num_seqs + 1) * shape.bytes_per_seq
        assert shape.bytes == round(blocks * shape.block_size + apart), (
            "the shape's bytes are not those of its blocks, sequences and sinks"
        )
    assert held <= shape.bytes, f"the shape says {shape.bytes} bytes, the store holds {held}"
    if shape.bytes:
        _check_budget(layout, shape)


def _check_budget(layout: KVLayout, shape: KVShape) -> None:
    for max_bytes in (shape.bytes, shape.bytes * 3 // 4):
        budget = replace(BUDGET, max_model_len=shape.max_model_len, max_bytes=max_bytes)
        capped = layout.shape(shape.groups, budget)
        assert capped.bytes <= max_bytes, f"{capped.bytes} bytes were taken of {max_bytes}"
        assert layout.space(capped).fits(shape.max_model_len), "one sequence of the longest length must fit"
    try:
        layout.shape(shape.groups, KVBudget(4, 40, 4, max_bytes=64))
    except UserError:
        return
    raise AssertionError("64 bytes for a sequence of 40 tokens were accepted")


def _check_full(layout: KVLayout, shape: KVShape) -> None:
    """As many longest sequences as fit, then no more; all of it comes back."""
    space = layout.space(shape)
    admitted = [seq_id for seq_id in range(9) if space.reserve(seq_id, shape.max_model_len)]
    assert len(admitted) == shape.max_num_seqs, f"{len(admitted)} sequences fit, {shape.max_num_seqs} were asked for"
    assert not space.reserve(99, 1), "a full space accepted another sequence"
    assert not space.fits(shape.max_model_len + 1), "a sequence beyond max_model_len was said to fit"
    usage = space.usage()
    assert usage.used_tokens <= usage.allocated_tokens <= usage.capacity_tokens, f"inconsistent usage: {usage}"
    for seq_id in admitted:
        space.release(seq_id)
    space.release(12345)
    assert space.reserve(99, shape.max_model_len), "released blocks did not come back"


class KVLife:
    """Sequences with known tokens: for each, K and V per layer as they must come back."""

    def __init__(
        self,
        layout: KVLayout,
        shape: KVShape,
        provided: frozenset[str],
        rng: random.Random,
        device: str,
        kv_error: float | None,
    ) -> None:
        self.shape, self.provided, self.rng, self.device = shape, provided, rng, device
        self.kv_error = kv_error
        self.highest: dict[int, int] = {}
        self.squares = [0.0, 0.0]
        self.space: Any = layout.space(shape)
        self.store: Any = layout.store(shape, device, torch.float32)
        self.known: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self.starts: dict[int, int] = {}
        self.next_id = 0

    def step(self) -> None:
        action = self.rng.choice(("append", "append", "append", "truncate", "fork", "release", "export"))
        if action == "append" or not self.known:
            self.append()
        elif action == "release":
            self.release(self.rng.choice(sorted(self.known)))
        elif f"kv:{action}" in self.provided:
            getattr(self, action)(self.rng.choice(sorted(self.known)))
        usage = self.space.usage()
        assert 0 <= usage.used_tokens <= usage.allocated_tokens <= usage.capacity_tokens, f"usage: {usage}"

    def length(self, seq_id: int) -> int:
        return self.known[seq_id][0][0].shape[0]

    def append(self) -> None:
        """New tokens for some sequences and perhaps a new one; then every one of them is read back."""
        chosen = [seq_id for seq_id in sorted(self.known) if self.rng.random() < 0.7]
        if len(self.known) < self.shape.max_num_seqs and self.rng.random() < 0.5:
            chosen.append(self.next_id)
            self.known[self.next_id] = {
                layer: self._draw(layer, 0) for group in self.shape.groups for layer in group.layers
            }
            self._begin(self.next_id)
            self.next_id += 1
        self.rng.shuffle(chosen)
        uniform = self.rng.choice((None, 1, 2))
        longest = self.shape.max_query_len or BUDGET.max_model_len
        lengths = {seq_id: min(uniform or self.rng.choice((1, 1, 3, 11)), longest) for seq_id in chosen}
        grown = [seq_id for seq_id in chosen if self._reserve(seq_id, lengths[seq_id])]
        if grown:
            self._write_and_read(grown, [lengths[seq_id] for seq_id in grown])
        for seq_id in set(chosen) - set(grown):
            if not self.length(seq_id):
                self.release(seq_id)

    def _begin(self, seq_id: int) -> None:
        """A new sequence, which holds nothing yet."""

    def _new(self, seq_id: int, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V of the sequence's next tokens."""
        return self._draw(layer, count)

    def _copy(self) -> None:
        """What copy-on-write asks for, before anything else is written."""
        if hasattr(self.space, "take_copies"):
            self.store.copy(self.space.take_copies())

    def _reserve(self, seq_id: int, num_new: int) -> bool:
        before = self.space.usage()
        if self._room(seq_id, num_new):
            return True
        assert self.space.usage() == before, "a refused reservation changed the space"
        return False

    def _room(self, seq_id: int, num_new: int) -> bool:
        """One token more now and then as schedulers ask for a whole step of them."""
        length = self.length(seq_id)
        ask = getattr(self.space, "reserve_next", None)
        if ask is None or num_new > 1 or not length or self.rng.random() < 0.5:
            return self.space.reserve(seq_id, length + num_new)
        served: int = ask([next_token(seq_id, length)])
        return served == 1

    def _write_and_read(self, ids: Sequence[int], new: Sequence[int]) -> None:
        self._copy()
        pasts = [self.length(seq_id) for seq_id in ids]
        for seq_id, count in zip(ids, new, strict=True):
            for layer, old in self.known[seq_id].items():
                drawn = self._new(seq_id, layer, count)
                self.known[seq_id][layer] = torch.cat((old[0], drawn[0])), torch.cat((old[1], drawn[1]))
            self.highest[seq_id] = max(self.highest.get(seq_id, 0), self.length(seq_id))
        if self.space.recompute:
            pasts = [0] * len(ids)
        queries = [self.length(seq_id) - past for seq_id, past in zip(ids, pasts, strict=True)]
        cached = self._placed(ids, pasts)
        batch = self._batch(ids, queries, cached)
        for index, group in enumerate(self.shape.groups):
            for layer in group.layers:
                parts = [self.known[seq_id][layer] for seq_id in ids]
                k, v = (
                    torch.cat([part[side][past:] for part, past in zip(parts, pasts, strict=True)]) for side in (0, 1)
                )
                self.store.write(layer, k, v, batch, batch.groups[index])
                self._observe(layer, index, batch)
                view = self.store.view(layer, batch, batch.groups[index])
                self._compare(view, parts, queries, cached, self._ring_window(index))

    def _placed(self, ids: Sequence[int], pasts: Sequence[int]) -> list[int]:
        """Let the layout arrange its tables and drop tokens; returns how many tokens each cache then holds."""
        place = getattr(self.space, "place", lambda seq_id, start, stop: 0)
        lengths = [self.length(seq_id) for seq_id in ids]
        dropped = [place(*each) for each in zip(ids, pasts, lengths, strict=True)]
        if hasattr(self.space, "evictions"):
            self.store.evict(self.space.evictions())
            again = [place(*each) for each in zip(ids, pasts, lengths, strict=True)]
            assert again == dropped, "asked again for the same tokens, place answers differently"
            assert not self.space.evictions(), "the same tokens are evicted twice"
        self.starts.update(zip(ids, pasts, strict=True))
        return [length - gone for length, gone in zip(lengths, dropped, strict=True)]

    def _batch(self, ids: Sequence[int], queries: Sequence[int], cached: Sequence[int]) -> Batch:
        """One batch with the slots and the block table of each group."""
        size, batches = self.shape.block_size, []
        for number in range(self.shape.num_tables):
            tables = [list(self.space.block_table(seq_id, number)) for seq_id in ids]
            for table, tokens in zip(tables, cached, strict=True):
                assert len(table) * size >= tokens, "the block table is too short for what was reserved"
            batches.append(
                make_batch(
                    queries,
                    cached,
                    tables,
                    block_size=size,
                    sink_block=self.shape.blocks_of(number),
                    width=self.shape.blocks_per_seq,
                    device=self.device,
                )
            )
        groups = tuple(batches[self.shape.table_of(index)].groups[0] for index in range(len(self.shape.groups)))
        return replace(batches[0], groups=groups, tables=tuple(each.groups[0] for each in batches))

    def _observe(self, layer: int, index: int, batch: Batch) -> None:
        observe = getattr(self.store, "observe", None)
        if observe is not None:
            group = self.shape.groups[index]
            generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
            q = torch.randn(batch.num_tokens, 2 * group.num_kv_heads, group.key_dim, generator=generator)
            q = q.to(self.device)
            dims = 2 * group.num_kv_heads, group.num_kv_heads, group.key_dim, group.value_dim
            observe(LayerSpec(layer, index, *dims, scale=0.3, window=group.window), q, batch, batch.groups[index])

    def _ring_window(self, index: int) -> int | None:
        """The window of a group whose blocks are a ring; other groups must give everything back."""
        limits = self.shape.table_limits
        ring = bool(limits) and limits[self.shape.table_of(index)] is not None
        return self.shape.groups[index].window if ring else None

    def _compare(
        self,
        view: Any,
        parts: Sequence[tuple[Tensor, Tensor]],
        queries: Sequence[int],
        cached: Sequence[int],
        window: int | None,
    ) -> None:
        batched = view.batched(max(cached)) if hasattr(view, "batched") else None
        for index, (part, query, count) in enumerate(zip(parts, queries, cached, strict=True)):
            first = 0 if window is None else max(0, count - query - window + 1)
            for side, read in enumerate(view.sequence(index, count)):
                name = f"{type(view).__name__}: sequence {index}"
                self._check_read(read[first:], part[side], first, query, name)
                if batched is not None:
                    self._check_read(batched[side][index, first:count], part[side], first, query, f"{name}, batched")

    def _check_read(self, read: Tensor, known: Tensor, first: int, query: int, name: str) -> None:
        if self.kv_error is None:
            _check_read(read, known, first, query, name)
            return
        assert first + len(read) == len(known), f"{name} does not hold all its tokens"
        off, size = float((read - known[first:]).square().sum()), float(known[first:].square().sum())
        self.squares = [self.squares[0] + off, self.squares[1] + size]
        assert off <= (_READ_FACTOR * self.kv_error) ** 2 * size, f"{name} is off by {(off / size) ** 0.5:.3g}"

    def truncate(self, seq_id: int) -> None:
        """A layout that arranges or drops tokens may refuse to go back behind the last step, no further."""
        lowest = 1 if self.shape.max_truncate is None else self.highest[seq_id] - self.shape.max_truncate
        lowest = max(lowest, getattr(self.space, "oldest", lambda seq_id: 1)(seq_id))
        kept = self.rng.randint(max(1, min(lowest, self.length(seq_id))), self.length(seq_id))
        if seq_id in self._forked() and not hasattr(self.space, "take_copies"):
            return
        try:
            self.space.truncate(seq_id, kept)
        except Unsupported:
            assert hasattr(self.space, "place"), "a layout that keeps everything refused to truncate"
            assert kept <= self.starts[seq_id], "tokens of the last step cannot be cut"
            return
        self.known[seq_id] = {layer: (k[:kept], v[:kept]) for layer, (k, v) in self.known[seq_id].items()}

    def _forked(self) -> set[int]:
        """Sequences that share a block with another: how they may be cut is up to the layout."""
        tables = {seq_id: set(self.space.block_table(seq_id)) for seq_id in self.known}
        return {a for a in tables for b in tables if a != b and tables[a] & tables[b]}

    def fork(self, seq_id: int) -> None:
        if len(self.known) == self.shape.max_num_seqs:
            return
        count = self.rng.randint(1, self.length(seq_id)) if self.rng.random() < 0.5 else self.length(seq_id)
        pairs = self.space.fork(seq_id, self.next_id, count)
        if pairs is None:
            return
        self.store.copy(pairs)
        self.known[self.next_id] = {layer: (k[:count], v[:count]) for layer, (k, v) in self.known[seq_id].items()}
        self.starts[self.next_id] = self.starts[seq_id]
        self.highest[self.next_id] = self.highest[seq_id]
        self.next_id += 1

    def release(self, seq_id: int) -> None:
        self.space.release(seq_id)
        self.highest.pop(seq_id, None)
        del self.known[seq_id]

    def export(self, seq_id: int) -> None:
        """Swap out and in again: the blocks come back at another place or the same, with the same content."""
        if seq_id in self._forked():
            return
        length = self.length(seq_id)
        count = -(-length // self.shape.block_size)
        data = self.store.export_blocks(list(self.space.block_table(seq_id))[:count])
        self.space.release(seq_id)
        assert self.space.reserve(seq_id, length), "what was just released did not come back"
        self.store.import_blocks(list(self.space.block_table(seq_id))[:count], data)

    def end(self) -> None:
        for seq_id in sorted(self.known):
            self.release(seq_id)
        usage = self.space.usage()
        assert usage.allocated_tokens == 0, f"{usage.allocated_tokens} tokens are still allocated at the end"
        assert usage.used_tokens == 0, f"{usage.used_tokens} tokens are still in use at the end"
        if self.kv_error is not None:
            error = (self.squares[0] / self.squares[1]) ** 0.5
            assert error <= self.kv_error, f"what is read is off by {error:.3g}, the component states {self.kv_error}"

    def _draw(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        group = next(group for group in self.shape.groups if layer in group.layers)
        generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        keys = torch.randn(count, group.num_kv_heads, group.key_dim, generator=generator).to(self.device)
        if group.shared_values:
            return keys, keys[..., : group.value_dim]
        return keys, torch.randn(count, group.num_kv_heads, group.value_dim, generator=generator).to(self.device)


def _check_read(read: Tensor, known: Tensor, first: int, query: int, name: str) -> None:
    """`read` begins at index `first` of the cache. Where fewer than all tokens are left, order and origin count."""
    if first + len(read) == len(known):
        assert torch.equal(read, known[first:]), f"{name} reads back differently"
        return
    same = (read[:, None] == known[None]).all(-1)  # [rows, tokens, heads]
    assert same.any(1).all(), f"{name} holds what is no token of it"
    origin = same.int().argmax(1)
    assert (origin[1:] > origin[:-1]).all(), f"{name} holds its tokens out of order"
    assert torch.equal(read[-query:], known[-query:]), f"{name} has lost new tokens"
