"""How tokens are picked from logits: the protocol that faster kernels fulfil.

Its plain PyTorch meaning is `infermix.toolkit.sampling.TorchSelector`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """Sampling parameters of R rows, each `[R]` on the device of the logits and contiguous.

    `temperature` (0: greedy), `top_k` int64 (0: off), `top_p` (1: off) over what top-k left, `min_p` (0: off)
    relative to the most likely token, `noise` in (0, 1): float64. `unfiltered` says, on the host, that all three
    filters are off in every row.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise: Tensor
    unfiltered: bool = False


class TokenSelector(Protocol):
    """Picks one token per row of `logits [R, V]` (bf16, fp16 or fp32); ids `[R]` int64 come back.

    A model transform that brings a faster one has it as attribute `selector`; see `infermix.roles.transform`.
    """

    def greedy(self, logits: Tensor) -> Tensor:
        """The token of the largest logit. Capturable."""
        ...

    def draw(self, logits: Tensor, filters: Filters) -> Tensor:
        """The token at which the cumulative distribution, in the order of ids, reaches `filters.noise`.

        Greedy where the temperature is 0. No host read.
        """
        ...
