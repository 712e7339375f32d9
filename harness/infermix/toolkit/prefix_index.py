"""Which block holds which tokens: the two indexes of the prefix cache. Pure bookkeeping, no torch.

Both compare token ids, never hashes alone, so that two prefixes cannot be confused. A block's content depends on all
tokens before it; it is therefore found behind the block before it, which stands for everything earlier and is never
evicted before what follows it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Protocol

#: Bytes of one token id in `encode`.
TOKEN_BYTES = 4


def encode(token_ids: Sequence[int]) -> bytes:
    """`TOKEN_BYTES` bytes per token id, in order; unsigned, which Python converts three times faster than signed."""
    data = array("I", token_ids)
    assert data.itemsize == TOKEN_BYTES
    return data.tobytes()


@dataclass(slots=True)
class Found:
    """The longest cached prefix: full `blocks`, then the first `num_tail` tokens of the block `tail`."""

    blocks: list[int] = field(default_factory=list)
    tail: int = -1
    num_tail: int = 0


class PrefixIndex(Protocol):
    """Tokens come as `encode` makes them. Blocks are told apart per `salt`."""

    #: Whether a partly filled last block is worth publishing.
    keeps_tails: bool

    def find(self, data: bytes, salt: str) -> Found: ...

    def insert(self, before: int | None, data: bytes, blocks: Sequence[int], salt: str) -> list[int]:
        """Publish `blocks`, full but for the last one where tails are kept, behind the published block `before`.

        Returns, for each, the block that stands for its tokens: another one where they were published already, -1
        where it is not worth publishing.
        """
        ...

    def evict(self, block: int) -> None:
        """Forget a published block; nothing that is published follows it."""
        ...


class _Followers(dict[bytes, "_Followers"]):
    """The published blocks that follow a block, by their tokens."""

    __slots__ = ("block", "place")

    def __init__(self, block: int, place: tuple[_Followers, bytes] | None = None) -> None:
        self.block, self.place = block, place


class HashIndex:
    """Full blocks by hashing: for each published block a table of those that follow it. One look-up per block."""

    keeps_tails = False

    def __init__(self, block_size: int) -> None:
        self._full = Struct(f"{block_size * TOKEN_BYTES}s")
        self._roots: dict[str, _Followers] = {}
        self._of_block: dict[int, _Followers] = {}

    def find(self, data: bytes, salt: str) -> Found:
        node, found = self._root(salt), list[int]()
        for (tokens,) in self._blocks_of(data):
            follower = node.get(tokens)
            if follower is None:
                break
            node = follower
            found.append(node.block)
        return Found(found)

    def insert(self, before: int | None, data: bytes, blocks: Sequence[int], salt: str) -> list[int]:
        node, kept = self._root(salt) if before is None else self._of_block[before], list[int]()
        for (tokens,), block in zip(self._blocks_of(data), blocks, strict=True):
            if tokens not in node:
                node[tokens] = self._of_block[block] = _Followers(block, (node, tokens))
            node = node[tokens]
            kept.append(node.block)
        return kept

    def evict(self, block: int) -> None:
        node = self._of_block.pop(block)
        assert not node, f"block {block} is followed by others"
        assert node.place is not None
        before, tokens = node.place
        del before[tokens]

    def _blocks_of(self, data: bytes) -> Iterator[tuple[bytes]]:
        """The tokens of each full block, each in a tuple; faster than slicing."""
        return self._full.iter_unpack(memoryview(data)[: len(data) - len(data) % self._full.size])

    def _root(self, salt: str) -> _Followers:
        return self._roots.setdefault(salt, _Followers(-1))
