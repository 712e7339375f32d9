"""Masks compose with every decoder: the same constrained tokens, whatever drafts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoding import DRAFTING, generate, requests
from infermix.errors import UserError
from infermix.roles.request import Sequence
from infermix.toolkit.masking import MaskedDecoder, forbidden, pack_bits

Build = Callable[..., Any]


class OddThenEven:
    """Output i is of the parity of i, and ends with token 5 behind eight tokens."""

    def __init__(self) -> None:
        self.forgotten = 0

    def fill(self, sequence: Sequence, drafts: tuple[int, ...], bits: torch.Tensor, row: int) -> bool:
        position = len(sequence.tokens) + len(drafts) - sequence.num_prompt_tokens
        even = (torch.arange(96) % 2 == position % 2) & (torch.arange(96) != 5)
        bits[row] = pack_bits(torch.arange(96) == 5 if position == 8 else even)
        return True

    def forget(self, sequence: Sequence) -> None:
        self.forgotten += 1


def masked(engine: Any) -> OddThenEven:
    masks = OddThenEven()
    engine._decoder = MaskedDecoder(engine._decoder, masks)
    return masks


def follows(tokens: list[int]) -> bool:
    body = tokens[:8]
    return all(token % 2 == index % 2 for index, token in enumerate(body)) and tokens[8:] in ([], [5])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 20}], ids=["greedy", "sampled"])
def test_same_constrained_tokens_for_every_decoder(build_engine: Build, sampling: dict[str, Any]) -> None:
    wanted = requests(sampling)
    free, plain = build_engine(), build_engine()
    assert not all(follows(tokens) for tokens in generate(free, wanted).values())
    masks = masked(plain)
    expected = generate(plain, wanted)
    assert all(follows(tokens) for tokens in expected.values())
    assert masks.forgotten == len(wanted)
    for decoder in DRAFTING:
        engine = build_engine(parts={"decoder": decoder})
        masked(engine)
        assert generate(engine, wanted) == expected, decoder[0]
        assert engine.report().counters["draft_tokens"] > 0


def test_rejection_sampling_never_keeps_what_is_forbidden(build_engine: Build) -> None:
    engine = build_engine(parts={"decoder": ("self_speculative", {"skip_layers": (1,)})})
    masked(engine)
    found = generate(engine, requests({"temperature": 1.0}))
    assert all(follows(tokens) for tokens in found.values())
    assert engine.report().counters["accepted_draft_tokens"] > 0


def test_an_end_that_comes_too_early_is_refused(build_engine: Build) -> None:
    """Behind eight tokens only the stop token may come, and `min_new_tokens` forbids it there."""
    for decoder in ("autoregressive", "jacobi"):
        engine = build_engine(parts={"decoder": decoder})
        masked(engine)
        request = requests({"min_new_tokens": 12, "stop_token_ids": (5,)}, count=1)[0]
        sampling = replace(request.sampling, max_new_tokens=20)
        with pytest.raises(UserError, match="at least, but what constrains it ends behind 8"):
            generate(engine, [replace(request, sampling=sampling)])


@pytest.mark.parametrize("size", [1, 31, 32, 33, 96, 1000])
def test_bits_of_a_mask(size: int) -> None:
    """They come back, and follow the layout that grammar libraries write: token 32 j + i is bit i of word j."""
    mask = torch.rand(3, size, generator=torch.Generator().manual_seed(size)) < 0.5
    bits = torch.stack([pack_bits(row) for row in mask])
    assert bits.dtype == torch.int32
    assert torch.equal(forbidden(bits, size), ~mask)
    for token in range(size):
        assert bool(int(bits[0, token // 32]) >> (token % 32) & 1) == bool(mask[0, token])
