"""Masks compose with every decoder: the same constrained tokens, whatever drafts them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoding import DRAFTING, generate, requests
from infermix.errors import UserError
from infermix.roles.decoder import Forward
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit import masking as masking_module
from infermix.toolkit.masking import MaskedDecoder, MaskingSampler, forbidden, pack_bits

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


class Beside(OddThenEven):
    """Fills by a thread; says how often it was asked for all rows of a step, and how often it was too late to ask."""

    def __init__(self) -> None:
        super().__init__()
        self.thread, self.begun, self.filled = ThreadPoolExecutor(1), 0, 0

    def fill_all(self, sequences: list[Sequence], drafts: Any, bits: torch.Tensor) -> bool:
        self.filled += 1
        return self._all(sequences, drafts, bits)

    def begin(self, sequences: list[Sequence], bits: torch.Tensor) -> Callable[[], bool]:
        self.begun += 1
        return self.thread.submit(self._all, sequences, [()] * len(sequences), bits).result

    def _all(self, sequences: list[Sequence], drafts: Any, bits: torch.Tensor) -> bool:
        rows = torch.zeros(bits.shape, dtype=torch.int32)
        limited = [
            self.fill(seq, own, rows, row) for row, (seq, own) in enumerate(zip(sequences, drafts, strict=True))
        ]
        bits.numpy()[:] = rows.numpy()
        return any(limited)


def masked(engine: Any, kind: type[OddThenEven] = OddThenEven) -> Any:
    masks = kind()
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


@pytest.mark.parametrize("kv", ["concat", "dense", "paged"])
def test_masks_that_are_filled_beside_the_forward(build_engine: Build, kv: str) -> None:
    """`dense` has an order of its own; only the first step does not know what logits look like."""
    plain, beside = build_engine(parts={"kv": kv}), build_engine(parts={"kv": kv})
    masks, wanted = masked(beside, Beside), requests({"temperature": 0.9})
    masked(plain)
    assert generate(beside, wanted) == generate(plain, wanted)
    assert masks.begun >= 8
    assert masks.filled == 1


def test_masks_behind_drafts_are_not_filled_before_them(build_engine: Build) -> None:
    engine, wanted = build_engine(parts={"decoder": "jacobi"}), requests({})
    masks = masked(engine, Beside)
    assert all(follows(tokens) for tokens in generate(engine, wanted).values())
    assert not masks.begun
    assert masks.filled


def rows_of(sequences: list[Sequence], width: int = 96) -> Forward:
    return Forward(torch.zeros(len(sequences), width), sequences, torch.arange(len(sequences)))


class Greedy:
    """Says which tokens are allowed in place of drawing one."""

    def sample(self, forward: Forward) -> torch.Tensor:
        return forward.logits.isfinite()


def test_begun_rows_are_found_in_any_order() -> None:
    sequences = [Sequence(index, requests({}, count=1)[0], [1] * (2 + index), 2) for index in range(4)]
    for index, sequence in enumerate(sequences):
        sequence.num_computed = len(sequence.tokens) - 1
        sequence.seq_id = index
    masks, sampler = Beside(), Greedy()
    masking = MaskingSampler(sampler, masks)
    allowed = masking.sample(rows_of(sequences))
    assert not torch.equal(allowed[0], allowed[1])
    plan = Plan([Scheduled(sequence, 1) for sequence in sequences])
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 1], [3]):
        masking.begin(plan)
        assert torch.equal(masking.sample(rows_of([sequences[each] for each in order])), allowed[order])
    assert masks.filled == 1
    masking.begin(Plan(plan.entries[:2]))
    assert torch.equal(masking.sample(rows_of(sequences)), allowed), "some rows were not begun"
    assert masks.filled == 2


def test_masks_that_nobody_asked_for_are_waited_for() -> None:
    class Fails(Beside):
        def begin(self, sequences: list[Sequence], bits: torch.Tensor) -> Callable[[], bool]:
            return self.thread.submit(lambda: bool(1 // 0)).result

    sequence = Sequence(0, requests({}, count=1)[0], [1, 2, 3], 2, num_computed=2)
    masking = MaskingSampler(Greedy(), Fails())
    masking.begin(Plan([Scheduled(sequence, 1)]))  # what logits look like is not known yet
    masking.sample(rows_of([sequence]))
    masking.begin(Plan([Scheduled(sequence, 1)]))
    with pytest.raises(ZeroDivisionError):
        masking.settle()
    masking.settle()


def test_a_row_that_comes_again_is_not_unpacked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []
    monkeypatch.setattr(masking_module, "forbidden", lambda *given: unpacked.append(1) or forbidden(*given))
    monkeypatch.setattr(masking_module, "_MOST_KEPT", 2)
    masking = MaskingSampler(Greedy(), OddThenEven())
    sequence = Sequence(0, requests({}, count=1)[0], [1, 2], 2)
    found = []
    for made in (0, 1, 2, 3, 8, 1, 0):
        sequence.tokens[2:] = [7] * made
        found.append(masking.sample(rows_of([sequence]))[0])
    assert len(unpacked) == 5, "even, odd, neither again; the stop token clears both"
    expected = [even.tolist() for even in found]
    assert expected[0] == expected[2] == expected[6]
    assert expected[1] == expected[3] == expected[5]
    assert found[4].nonzero().tolist() == [[5]]
    assert found[0].nonzero().flatten().tolist() == list(range(0, 96, 2))


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
