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


def encode(token_ids: Sequence[int], count: int | None = None) -> bytes:
    """`TOKEN_BYTES` bytes per token id, in order, of the first `count`.

    Unsigned, which Python converts three times faster than signed; all at once, which is faster than a part of them.
    """
    data = array("I", token_ids)
    assert data.itemsize == TOKEN_BYTES
    return data.tobytes() if count is None else memoryview(data)[:count].tobytes()


@dataclass(slots=True)
class Found:
    """The longest cached prefix: full `blocks`, then the first `num_tail` tokens of the block `tail`."""

    blocks: array[int] = field(default_factory=lambda: array("i"))
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
    """The published blocks that follow a block, by their tokens. `depth` counts the blocks up to this one.

    `spans` are the runs of blocks that begin behind it, by the tokens of all of them: their blocks, and the
    node of the last one, whose `span` says where it is entered.
    """

    __slots__ = ("block", "depth", "place", "span", "spans")

    def __init__(self, block: int, depth: int = 0, place: tuple[_Followers, bytes] | None = None) -> None:
        self.block, self.depth, self.place = block, depth, place
        self.spans: dict[bytes, tuple[array[int], _Followers]] = {}
        self.span: tuple[_Followers, bytes] | None = None


class HashIndex:
    """Full blocks by hashing: for each published block a table of those that follow it.

    One look-up per block, and one for `span` blocks at once where all of them are published: a long prefix costs
    little more than the hash of its tokens.
    """

    keeps_tails = False

    def __init__(self, block_size: int, span: int = 64) -> None:
        self._span = span
        self._full = Struct(f"{block_size * TOKEN_BYTES}s")
        self._roots: dict[str, _Followers] = {}
        self._of_block: dict[int, _Followers] = {}

    def find(self, data: bytes, salt: str) -> Found:
        node, at, found = self._root(salt), 0, array("i")
        width = self._span * self._full.size
        while (run := node.spans.get(data[at : at + width])) is not None:
            blocks, node = run
            found.extend(blocks)
            at += width
        for (tokens,) in self._blocks_of(data, at):
            follower = node.get(tokens)
            if follower is None:
                break
            node = follower
            found.append(node.block)
        return Found(found)

    def insert(self, before: int | None, data: bytes, blocks: Sequence[int], salt: str) -> list[int]:
        node, kept = self._root(salt) if before is None else self._of_block[before], list[int]()
        for (tokens,), block in zip(self._blocks_of(data), blocks, strict=True):
            follower = node.get(tokens)
            node = self._append(node, tokens, block) if follower is None else follower
            kept.append(node.block)
        return kept

    def evict(self, block: int) -> None:
        node = self._of_block.pop(block)
        assert not node, f"block {block} is followed by others"
        assert node.place is not None
        before, tokens = node.place
        del before[tokens]
        if node.span is not None:
            start, key = node.span
            del start.spans[key]

    def _append(self, before: _Followers, tokens: bytes, block: int) -> _Followers:
        node = _Followers(block, before.depth + 1, (before, tokens))
        before[tokens] = self._of_block[block] = node
        if node.depth % self._span == 0:
            self._enter_span(node)
        return node

    def _enter_span(self, last: _Followers) -> None:
        """It is dropped with its last block, the first of them to be evicted."""
        node, tokens, blocks = last, list[bytes](), array("i")
        for _ in range(self._span):
            assert node.place is not None
            blocks.append(node.block)
            node, own = node.place
            tokens.append(own)
        blocks.reverse()
        key = b"".join(reversed(tokens))
        node.spans[key] = (blocks, last)
        last.span = (node, key)

    def _blocks_of(self, data: bytes, start: int = 0) -> Iterator[tuple[bytes]]:
        """The tokens of each full block from byte `start` on, each in a tuple; faster than slicing."""
        stop = len(data) - (len(data) - start) % self._full.size
        return self._full.iter_unpack(memoryview(data)[start:stop])

    def _root(self, salt: str) -> _Followers:
        return self._roots.setdefault(salt, _Followers(-1))
