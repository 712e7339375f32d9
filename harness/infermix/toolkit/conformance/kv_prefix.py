"""Conformance of prefix caches: K and V are a function of all tokens so far, so what is shared must be the same."""

from __future__ import annotations

import zlib
from array import array
from typing import Any

import torch
from torch import Tensor

from infermix.toolkit.conformance.kv import KVLife

#: Tokens of a sequence's script: as many as the longest sequence has.
_LENGTH = 40


class PrefixLife(KVLife):
    """Sequences follow scripts that often begin as earlier ones did, and start with what `match` finds."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scripts: dict[int, list[int]] = {}
        self.past: list[list[int]] = [[]]
        self.num_hits = 0

    def _begin(self, seq_id: int) -> None:
        stem = self.rng.choice(self.past)
        script = self.scripts[seq_id] = self._continued(stem[: self.rng.randint(0, len(stem))])
        prompt = script[: self.rng.randint(1, _LENGTH - 11)]
        most = len(prompt) - 1
        expected = self.space.peek(prompt, most)
        hit = self.space.match(seq_id, prompt, most)
        assert hit <= expected <= most, f"{hit} tokens are served, {expected} were promised, {most} are allowed"
        if hit:
            assert self.space.reserve(seq_id, hit), "what a prefix cache serves is not reserved"
            self.num_hits += 1
            self.starts[seq_id] = self.highest[seq_id] = hit
            for layer in self.known[seq_id]:
                self.known[seq_id][layer] = self._tokens(script[:hit], layer, 0)

    def _new(self, seq_id: int, layer: int, count: int) -> tuple[Tensor, Tensor]:
        start = self.known[seq_id][layer][0].shape[0]
        return self._tokens(self.scripts[seq_id][: start + count], layer, start)

    def append(self) -> None:
        super().append()
        for seq_id in self.known:
            self.space.register(seq_id, self.scripts[seq_id][: self.length(seq_id)], self.length(seq_id))

    def truncate(self, seq_id: int) -> None:
        super().truncate(seq_id)
        self.scripts[seq_id] = self._continued(self.scripts[seq_id][: self.length(seq_id)])

    def fork(self, seq_id: int) -> None:
        child = self.next_id
        super().fork(seq_id)
        if self.next_id > child:
            self.scripts[child] = self._continued(self.scripts[seq_id][: self.length(child)])

    def release(self, seq_id: int) -> None:
        script, length = self.scripts.pop(seq_id), self.length(seq_id)
        if self.rng.random() < 0.7:
            self._copy()
            self.space.register(seq_id, script[:length], length, last=True)
        self.past.append(script[:length])
        super().release(seq_id)

    def end(self) -> None:
        super().end()
        assert self.num_hits, "nothing was ever found in the prefix cache"
        self.space.reset_prefixes()
        longest = max(self.past, key=len)
        assert self.space.keeps_prefixes or not self.space.peek(longest, len(longest)), "a reset kept prefixes"

    def _continued(self, tokens: list[int]) -> list[int]:
        return tokens + [self.rng.randrange(2) for _ in range(_LENGTH - len(tokens))]

    def _tokens(self, script: list[int], layer: int, start: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens `start` to the end of `script`, each drawn from all tokens up to its own."""
        group = next(group for group in self.shape.groups if layer in group.layers)
        rows = [self._row(script[: position + 1], layer) for position in range(start, len(script))]
        keys, values = (
            torch.stack([row[side] for row in rows]) if rows else torch.empty(0, group.num_kv_heads, dim)
            for side, dim in ((0, group.key_dim), (1, group.value_dim))
        )
        return keys.to(self.device), values.to(self.device)

    def _row(self, tokens: list[int], layer: int) -> tuple[Tensor, Tensor]:
        group = next(group for group in self.shape.groups if layer in group.layers)
        generator = torch.Generator().manual_seed(zlib.crc32(array("i", [layer, *tokens]).tobytes()))
        keys = torch.randn(group.num_kv_heads, group.key_dim, generator=generator)
        if group.shared_values:
            return keys, keys[..., : group.value_dim]
        return keys, torch.randn(group.num_kv_heads, group.value_dim, generator=generator)
