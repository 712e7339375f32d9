"""Medusa heads (Cai et al., 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads").

Head k reads the hidden state from which the model's own head reads the next token, and guesses the token k places
further on: `W (h + silu(A h + b))`, with as many residual blocks in the brackets as there are layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """`h + silu(A h + b)`; starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))


class MedusaHeads(nn.ModuleList):
    """`num_heads` heads over `width` numbers; names of tensors as in published checkpoints (`0.0.linear.weight`)."""

    def __init__(self, num_heads: int, num_layers: int, width: int, vocab_size: int) -> None:
        super().__init__(
            nn.Sequential(
                *(ResidualBlock(width) for _ in range(num_layers)), nn.Linear(width, vocab_size, bias=False)
            )
            for _ in range(num_heads)
        )

    def start_from(self, output: Tensor) -> None:
        """Every head begins as the model's own, whose weight `[V, D]` is given."""
        with torch.no_grad():
            for head in self:
                head[-1].weight.copy_(output)  # type: ignore[index]

    def best(self, hidden: Tensor, count: int) -> Tensor:
        """The `count` most likely tokens of every head, best first: `hidden [N, D]` -> `[N, heads, count]`."""
        return torch.stack([head(hidden).topk(count, dim=-1).indices for head in self], dim=1)
