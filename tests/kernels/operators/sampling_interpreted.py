"""Sampling under Triton's interpreter. Collected only where TRITON_INTERPRET was set before the start."""

from __future__ import annotations

import pytest
import torch
from infermix_kernels.greedy import greedy
from infermix_kernels.reference import sampling as meant
from sampling_checks import CASES, check_sample


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [1, 400])
def test_sample(name: str, width: int) -> None:
    check_sample("cpu", name, num_rows=3, width=width)


def test_sample_over_several_pieces_of_a_row() -> None:
    check_sample("cpu", "all filters", num_rows=2, width=4500)
    check_sample("cpu", "ties", num_rows=2, width=4500)


@pytest.mark.parametrize("width", [1, 5, 9000])
def test_greedy_takes_the_first_of_equal_logits(width: int) -> None:
    logits = torch.randint(0, 50, (3, width), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(greedy(logits), meant.greedy(logits))
