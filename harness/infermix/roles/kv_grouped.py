"""What attention may read in place of a layout that quantizes whole groups of tokens. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class GroupedView:
    """Groups of G old tokens in 4 or 2 bits, keys per channel and values per token; recent tokens as they came.

    - `keys` `[groups, Hkv, G, Dk * bits / 8]`, `values` alike, uint8, the first number of a byte in its lowest bits;
      group i of block b is group `b * block_size / G + i`
    - `key_factors` `[groups, Hkv, Dk, 2]`, `value_factors` `[groups, Hkv, G, Dv / G, 2]`, fp16: scale and zero point
      of each channel of a group, and of each G channels of a token; number * scale + zero point is the value
    - `tail_keys` `[rows, capacity, Hkv, Dk]`, `tail_values` alike, in the model's dtype: token p at p % capacity
    - `block_tables [B, W]`, `tail_rows [B]` (any stride), `context_lens [B]`, int32

    Of a context, whole groups older than its last `num_recent` tokens are read from `keys` and `values`, the rest
    from the tail. Only layouts that provide `view:kivi` hand it out; those also answer `sequence` and `batched`.
    """

    keys: Tensor
    values: Tensor
    key_factors: Tensor
    value_factors: Tensor
    tail_keys: Tensor
    tail_values: Tensor
    block_tables: Tensor
    tail_rows: Tensor
    context_lens: Tensor
    block_size: int
    num_recent: int

    @property
    def in_words(self) -> bool:
        """Whether groups and heads fill words of 32 bits, as kernels need them."""
        bits = self.keys.shape[3] * 8 // self.tail_keys.shape[3]
        sizes = (self.keys.shape[2], self.tail_keys.shape[3], self.tail_values.shape[3])
        return fills_words(bits, *sizes)


def fills_words(bits: int, *sizes: int) -> bool:
    return all(size * bits % 32 == 0 for size in sizes)
