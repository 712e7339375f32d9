"""Filtered sampling against a full sort in fp64."""

from __future__ import annotations

import torch
from infermix_kernels.reference import sampling as meant
from infermix_kernels.sampling import sample
from torch import Tensor

#: temperature, top_k, top_p, min_p
CASES: dict[str, tuple[float, int, float, float]] = {
    "plain": (0.8, 0, 1.0, 0.0),
    "greedy": (0.0, 5, 0.5, 0.1),
    "top-k": (1.0, 7, 1.0, 0.0),
    "top-k of everything": (1.0, 1 << 20, 1.0, 0.0),
    "top-p": (1.3, 0, 0.9, 0.0),
    "top-p zero": (1.0, 0, 0.0, 0.0),
    "min-p": (1.3, 0, 1.0, 0.1),
    "all filters": (1.3, 50, 0.9, 0.02),
    "ties": (1.0, 9, 0.7, 0.0),
    "all equal": (1.0, 100, 0.5, 0.0),
    "withheld": (1.0, 300, 0.95, 0.0),
}
#: fp32 exponentials against fp64: a cumulative mass that near to the noise, or to top-p, may fall on either side.
NEAR = 2e-6


def check_sample(device: str, name: str, num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> None:
    """Every drawn token is the reference's, but for draws at the very border of two."""
    logits = _logits(name, num_rows, width).to(dtype).to(device)
    noise = ((torch.arange(num_rows, dtype=torch.float64) + 0.37) / num_rows).to(device)
    temperature, top_k, top_p, min_p = (torch.full((num_rows,), value, device=device) for value in CASES[name])
    parameters = (temperature, top_k.long(), top_p.double(), min_p.double())
    out = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    sample(logits, *parameters, noise, out=out)
    expected = meant.sample(logits, *parameters, noise)
    different = out != expected
    if different.any():
        nearby = [meant.sample(logits, *parameters, noise * (1 + sign * NEAR)) for sign in (1, -1)]
        nearby += [meant.sample(logits, temperature, top_k.long(), top_p.double() * (1 + s), min_p, noise)
                   for s in (NEAR, -NEAR)]  # fmt: skip
        for candidate in nearby:
            different &= out != candidate
    assert not different.any(), f"{out[different]} instead of {expected[different]}"


def _logits(name: str, num_rows: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "ties":
        return torch.randint(0, 5, (num_rows, width), generator=generator).float()
    if name == "all equal":
        return torch.zeros(num_rows, width)
    logits = torch.randn(num_rows, width, generator=generator) * 3
    if name == "withheld" and width > 1:
        logits[:, ::2] = float("-inf")
    return logits
