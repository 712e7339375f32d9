"""A radix tree over token ids as index of the prefix cache. Pure bookkeeping, no torch."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from infermix.toolkit.prefix_index import TOKEN_BYTES, Found


@dataclass(slots=True, eq=False)
class _Node:
    """An edge of the tree: `key` are the tokens of `blocks`, all full but the block of a tail, which is a leaf alone.

    `first` (at most one block of tokens) is its place among the children of `parent`; `starts` are those of its own
    children in order, so that the nearest to any tokens are neighbours. `depth` is the number of blocks before it.
    """

    parent: _Node | None
    depth: int
    key: bytearray = field(default_factory=bytearray)
    blocks: array[int] = field(default_factory=lambda: array("i"))
    first: bytes = b""
    children: dict[bytes, _Node] = field(default_factory=dict)
    starts: list[bytes] = field(default_factory=list)

    def adopt(self, child: _Node, width: int) -> None:
        child.parent, child.first = self, bytes(child.key[:width])
        self.children[child.first] = child
        insort(self.starts, child.first)

    def disown(self, child: _Node) -> None:
        del self.children[child.first]
        del self.starts[bisect_left(self.starts, child.first)]


class RadixIndex:
    """Compressed paths of tokens, compared edge by edge instead of block by block.

    Beyond what the hash table finds, it finds a prefix that ends inside a block: the first tokens of that block can
    be copied. For that reason partly filled last blocks of ended sequences are kept as well.
    """

    keeps_tails = True

    def __init__(self, block_size: int) -> None:
        self._width = block_size * TOKEN_BYTES
        self._roots: dict[str, _Node] = {}
        self._node_of: dict[int, _Node] = {}
        self._depth_of: dict[int, int] = {}

    def find(self, data: bytes, salt: str) -> Found:
        node, width = self._root(salt), self._width
        at, blocks = 0, array("i")
        while (child := node.children.get(data[at : at + width])) is not None and len(child.key) >= width:
            size = len(child.key)
            if data[at : at + size] == child.key:
                blocks += child.blocks
                node, at = child, at + size
                continue
            whole, inside = divmod(_common(data[at : at + size], child.key), width)
            blocks += child.blocks[:whole]
            tail = child.blocks[whole] if inside >= TOKEN_BYTES else -1
            return Found(blocks, tail, inside // TOKEN_BYTES)
        return self._nearest(node, data[at : at + width], blocks)

    def insert(self, before: int | None, data: bytes, blocks: Sequence[int], salt: str) -> list[int]:
        node, index = (self._root(salt), 0) if before is None else self._behind(before)
        kept, width = list[int](), self._width
        for number, block in enumerate(blocks):
            tokens = data[number * width : (number + 1) * width]
            known = index * width < len(node.key)
            if known and node.key[index * width : (index + 1) * width] == tokens:
                index += 1
            elif not known and (child := node.children.get(tokens)) is not None:
                node, index = child, 1
            elif len(tokens) < width and self._is_prefix(node, index, tokens):
                kept.append(-1)
                continue
            else:
                node, index = self._append(node, index, tokens, block)
            kept.append(node.blocks[index - 1])
        return kept

    def evict(self, block: int) -> None:
        node = self._node_of.pop(block)
        del self._depth_of[block]
        assert not node.children, f"block {block} is followed by others"
        assert node.blocks.pop() == block, f"block {block} is not the last of its edge"
        del node.key[len(node.blocks) * self._width :]
        if not node.blocks:
            assert node.parent is not None
            node.parent.disown(node)

    def _root(self, salt: str) -> _Node:
        if salt not in self._roots:
            self._roots[salt] = _Node(None, 0)
        return self._roots[salt]

    def _behind(self, block: int) -> tuple[_Node, int]:
        """The node that holds a block, and the index behind it."""
        node = self._node_of[block]
        return node, self._depth_of[block] - node.depth + 1

    def _nearest(self, node: _Node, tokens: bytes, blocks: array[int]) -> Found:
        """Of the children's first blocks and tails, the one that shares most of `tokens`."""
        place = bisect_left(node.starts, tokens)
        best, length = b"", TOKEN_BYTES - 1
        for start in node.starts[max(place - 1, 0) : place + 1]:
            common = _common(start, tokens)
            if common > length:
                best, length = start, common
        if not best:
            return Found(blocks)
        return Found(blocks, node.children[best].blocks[0], length // TOKEN_BYTES)

    def _is_prefix(self, node: _Node, index: int, tokens: bytes) -> bool:
        """Whether the tokens of a tail are the beginning of what follows there already."""
        start = index * self._width
        if start < len(node.key):
            return node.key[start : start + len(tokens)] == tokens
        place = bisect_left(node.starts, tokens)
        return place < len(node.starts) and node.starts[place].startswith(tokens)

    def _append(self, node: _Node, index: int, tokens: bytes, block: int) -> tuple[_Node, int]:
        """Put a block behind the first `index` blocks of a node; returns its place."""
        if index < len(node.blocks):
            node = self._split(node, index)
        is_leaf = node.parent is not None and not node.children
        if not is_leaf or len(tokens) < self._width:
            child = _Node(node, node.depth + len(node.blocks), bytearray(tokens), array("i", (block,)))
            node.adopt(child, self._width)
            node = child
        else:
            node.key += tokens
            node.blocks.append(block)
        self._node_of[block] = node
        self._depth_of[block] = node.depth + len(node.blocks) - 1
        return node, len(node.blocks)

    def _split(self, node: _Node, index: int) -> _Node:
        """Cut an edge between two blocks; returns the upper part, which is new."""
        parent, at = node.parent, index * self._width
        assert parent is not None
        upper = _Node(parent, node.depth, node.key[:at], node.blocks[:index])
        parent.disown(node)
        parent.adopt(upper, self._width)
        node.depth += index
        del node.key[:at], node.blocks[:index]
        upper.adopt(node, self._width)
        for block in upper.blocks:
            self._node_of[block] = upper
        return upper


def _common(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Length of the common beginning, by bisection over comparisons of whole slices."""
    same, different = 0, min(len(a), len(b)) + 1
    while different - same > 1:
        middle = (same + different) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            different = middle
    return same
