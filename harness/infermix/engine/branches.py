"""Drafts that form trees: the depth of every new token, and which new tokens it sees."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from infermix.roles.batch import MAX_TREE_TOKENS

if TYPE_CHECKING:
    from infermix.engine.packing import PackEntry


def branches(entries: Sequence[PackEntry]) -> tuple[np.ndarray, np.ndarray]:
    """Of all new tokens in order: depth behind what is cached `[T]` int64, and row of the tree mask `[T]` int64."""
    pairs = [_of_entry(len(entry.token_ids), entry.parents) for entry in entries]
    return np.concatenate([depths for depths, _ in pairs]), np.concatenate([bits for _, bits in pairs])


def draft_depths(parents: tuple[int, ...]) -> list[int]:
    """Of each draft, counted from 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _of_entry(num_tokens: int, parents: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    if not parents:
        return np.arange(num_tokens), _chain(num_tokens)
    assert num_tokens <= MAX_TREE_TOKENS, f"a tree in {num_tokens} new tokens, at most {MAX_TREE_TOKENS} fit a mask"
    return _tree(num_tokens, parents)


@functools.lru_cache(maxsize=256)
def _chain(num_tokens: int) -> np.ndarray:
    if num_tokens > MAX_TREE_TOKENS:
        return np.zeros(num_tokens, np.int64)  # causal by its length
    return _signed([(2 << index) - 1 for index in range(num_tokens)])


@functools.lru_cache(maxsize=256)
def _tree(num_tokens: int, parents: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    num_own = num_tokens - len(parents)
    bits = [(2 << index) - 1 for index in range(num_own)]
    for index, parent in enumerate(parents):
        assert -1 <= parent < index, f"draft {index} follows draft {parent}, which is not before it"
        bits.append(bits[num_own + parent] | 1 << (num_own + index))
    depths = [*range(num_own), *(num_own - 1 + depth for depth in draft_depths(parents))]
    return np.array(depths, np.int64), _signed(bits)


def _signed(bits: list[int]) -> np.ndarray:
    """64 bits each, as int64: torch has no unsigned shifts."""
    return np.array(bits, np.uint64).view(np.int64)
