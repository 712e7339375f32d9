"""Quantized KV: bytes by hand, what quantization may cost, and that no schedule of writes changes what is read."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from infermix.errors import Unsupported, UserError
from infermix.features import match
from infermix.plugins import load_catalogue
from infermix.roles.batch import Batch
from infermix.roles.component import Choice, Role
from infermix.roles.facts import MachineFacts
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.toolkit.conformance.batches import make_batch, next_token
from infermix.toolkit.conformance.component import example_model
from infermix_kernels.reference.grouped import pack, quantize, unpack
from infermix_kv.kivi_rule import KiviRule
from infermix_kv.kv_kivi import KiviLayout
from infermix_kv.kv_quantized import QuantizedLayout
from infermix_reference.kv_paged import PagedLayout
from torch import Tensor

LLAMA_3_8B = (KVGroup(tuple(range(32)), 8, 128, 128),)
GROUP = KVGroup((0,), 2, 16, 8)
#: Groups of 4 tokens; at most 12 in full precision, of which the last 4 always are.
SMALL = KiviLayout(4, 4, 12, 8)
LAYOUTS = [
    QuantizedLayout("int8", 4), QuantizedLayout("fp8", 4), SMALL, KiviLayout(2, 4, 12, 8), KiviLayout(4, 4, 8, 4),
]  # fmt: skip
IDS = ["int8", "fp8", "int4", "int2", "shortest tail"]


def _per_token(layout: Any, context: int) -> float:
    """Bytes of one token of a sequence of `context`, what the sequence costs besides included."""
    shape = layout.shape(LLAMA_3_8B, KVBudget(1, context, 2))
    return shape.bytes_per_token + shape.bytes_per_seq / context


@pytest.mark.parametrize(
    ("layout", "per_token", "per_seq"),
    [
        # 32 layers x 8 heads x (2 x 128 numbers + 2 scales of 4 bytes)
        (QuantizedLayout("int8", 16), 32 * 8 * (256 + 8), 0),
        (QuantizedLayout("fp8", 16), 32 * 8 * (256 + 8), 0),
        # half a byte a number; per 32 numbers a scale and a zero point of 2 bytes; 128 tokens of 131,072 bytes
        (KiviLayout(4, 32, 128, 32), 32 * 8 * (128 + 256 / 32 * 4), 128 * 131_072),
        (KiviLayout(2, 32, 128, 32), 32 * 8 * (64 + 256 / 32 * 4), 128 * 131_072),
    ],
    ids=IDS[:4],
)
def test_bytes_of_llama_3_8b_are_those_that_are_allocated(layout: Any, per_token: float, per_seq: int) -> None:
    shape = layout.shape(LLAMA_3_8B, KVBudget(max_num_seqs=3, max_model_len=8192, element_bytes=2))
    assert (shape.bytes_per_token, shape.bytes_per_seq) == (per_token, per_seq)
    block = int(per_token * shape.block_size)
    assert shape.bytes == (3 * 8192 // shape.block_size + 1) * block + 4 * per_seq
    assert layout.store(shape, "meta", torch.bfloat16).allocated_bytes() == shape.bytes


def test_int4_at_8192_tokens_takes_less_than_a_third_of_bf16() -> None:
    """0.3125 for numbers, scales and zero points, and 128 / 8192 for the tail."""
    share = _per_token(KiviLayout(4, 32, 128, 32), 8192) / _per_token(PagedLayout(16), 8192)
    assert share == 0.3125 + 128 / 8192
    assert share <= 0.33


@pytest.mark.parametrize(("layout", "least"), list(zip(LAYOUTS[:2], (1.9, 1.9), strict=True)), ids=IDS[:2])
def test_sequences_that_fit_the_same_memory(layout: Any, least: float) -> None:
    budget = KVBudget(max_num_seqs=10_000, max_model_len=8192, element_bytes=2, max_bytes=100 * 2**30)

    def fit(given: Any) -> int:
        return given.shape(LLAMA_3_8B, budget).capacity_tokens // 8192

    assert fit(layout) >= least * fit(PagedLayout(16))


def test_as_many_tails_as_leave_room_for_a_sequence() -> None:
    layout, budget = KiviLayout(4, 32, 128, 32), KVBudget(64, 4096, 2)
    whole = layout.shape(LLAMA_3_8B, budget)
    assert whole.max_num_seqs == 64
    least = int(layout.shape(LLAMA_3_8B, replace(budget, max_num_seqs=1)).bytes)
    shape = layout.shape(LLAMA_3_8B, replace(budget, max_bytes=least))
    assert (shape.max_num_seqs, shape.num_blocks, shape.bytes) == (1, 128, least)
    with pytest.raises(UserError, match="do not hold one sequence"):
        layout.shape(LLAMA_3_8B, replace(budget, max_bytes=least - 1))


@pytest.mark.parametrize("bits", [2, 4])
def test_packing_is_reversible(bits: int) -> None:
    numbers = torch.randint(2**bits, (3, 5, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = pack(numbers, bits)
    assert packed.shape == (3, 5, 16 * bits // 8)
    assert torch.equal(unpack(packed, bits), numbers)


@pytest.mark.parametrize("offset", [0.0, 40.0])
@pytest.mark.parametrize("bits", [2, 4])
def test_no_number_is_off_by_more_than_half_a_step(bits: int, offset: float) -> None:
    """Zero points keep channels that lie far from 0; they and scales are rounded to fp16 (11 bits)."""
    x = torch.randn(6, 32, 8, generator=torch.Generator().manual_seed(0)) + offset
    numbers, scale, zero = quantize(x, bits, dim=1)
    error = (numbers * scale.float() + zero.float() - x).abs()
    step = (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)) / (2**bits - 1)
    assert (error <= 0.501 * step + 2**-10 * x.abs().amax()).all()
    assert int(numbers.max()) == 2**bits - 1


def test_equal_numbers_come_back_exactly() -> None:
    x = torch.full((1, 4, 2), 0.5)
    numbers, scale, zero = quantize(x, 2, dim=1)
    assert torch.equal(numbers * scale.float() + zero.float(), x)


class Lived:
    """One layout with sequences that are written piece by piece; what is written is known from position alone."""

    def __init__(self, layout: Any, seed: int = 0, poison: bool = False) -> None:
        self.shape = layout.shape((GROUP,), KVBudget(4, 64, 4))
        self.space, self.store = layout.space(self.shape), layout.store(self.shape, "cpu", torch.float32)
        if poison:
            _poison(self.store)
        self.lengths: dict[int, int] = {}
        generator = torch.Generator().manual_seed(seed)
        self.k = torch.randn(4, 64, 2, 16, generator=generator)
        self.v = torch.randn(4, 64, 2, 8, generator=generator)

    def batch(self, new: dict[int, int], captured: bool = False, padding: int = 0) -> Batch:
        """`new` tokens per sequence; padded rows behind, as in a captured step."""
        for seq, count in new.items():
            length = self.lengths.get(seq, 0)
            assert self.space.reserve(seq, length + count)
            if hasattr(self.space, "place"):
                self.space.place(seq, length, length + count)
        query = next(iter(new.values()))
        contexts = [*(self.lengths.get(seq, 0) + count for seq, count in new.items()), *[0] * padding]
        return self._tables(list(new), [*new.values(), *[query] * padding], contexts, captured, padding)

    def _tables(
        self, seqs: list[int], queries: list[int], contexts: list[int], captured: bool = False, padding: int = 0
    ) -> Batch:
        """One table after the other, each with its own sink."""
        batches = [
            make_batch(
                queries,
                contexts,
                [*(list(self.space.block_table(seq, number)) for seq in seqs), *[[]] * padding],
                block_size=self.shape.block_size,
                sink_block=self.shape.blocks_of(number),
                width=self.shape.blocks_per_seq,
                captured=captured,
                capacity=64,
            )
            for number in range(self.shape.num_tables)
        ]
        return replace(batches[0], tables=tuple(batch.groups[0] for batch in batches))

    def write(self, new: dict[int, int], captured: bool = False, padding: int = 0, shift: float = 0.0) -> Any:
        """Returns the view; `shift` makes other tokens of the same place."""
        batch = self.batch(new, captured, padding)
        spans = [(seq, self.lengths.get(seq, 0), self.lengths.get(seq, 0) + count) for seq, count in new.items()]
        k = torch.cat([self.k[seq, start:stop] + shift for seq, start, stop in spans])
        v = torch.cat([self.v[seq, start:stop] - shift for seq, start, stop in spans])
        if padding:
            k, v = (torch.cat((x, x.new_full((padding * len(x) // len(new), *x.shape[1:]), 1e3))) for x in (k, v))
        self.store.write(0, k, v, batch, batch.groups[0])
        self.lengths.update({seq: stop for seq, _, stop in spans})
        return self.store.view(0, batch, batch.groups[0])

    def truncate(self, seq: int, length: int) -> None:
        self.space.truncate(seq, length)
        self.lengths[seq] = length

    def read(self, seq: int) -> tuple[Tensor, Tensor]:
        """What attention would read of one sequence now, without writing."""
        length = self.lengths[seq]
        batch = self._tables([seq], [1], [length])
        view = self.store.view(0, batch, batch.groups[0])
        one, many = view.sequence(0, length), view.batched(length)
        assert all(torch.equal(a, b[0]) for a, b in zip(one, many, strict=True))
        return one


def _poison(store: Any) -> None:
    parts = [store] if hasattr(store, "_pools") else [store._blocks, store._rows]
    for each in parts:
        for tensors in each.parts.values():
            for tensor in tensors:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)


def _equal(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize("length", [1, 7, 12, 13, 40, 61])
def test_chunks_of_any_size_leave_the_same(layout: Any, length: int) -> None:
    """All at once (most of it never sees the tail), in random pieces, token by token as captured steps, poisoned."""
    whole, pieces = Lived(layout), Lived(layout, poison=True)
    captured = Lived(layout, poison=True)
    whole.write({0: length})
    rng = random.Random(length)
    while (left := length - pieces.lengths.get(0, 0)) > 0:
        pieces.write({0: min(left, rng.choice((1, 2, 5, 17)))})
    for _ in range(length):
        captured.write({0: 1}, captured=True, padding=2)
    read = whole.read(0)
    assert not any(part.isnan().any() for part in read)
    assert _equal(read, pieces.read(0))
    assert _equal(read, captured.read(0))


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_drafts_that_are_cut_off_leave_nothing(layout: Any) -> None:
    """At every length up to four drafts are written, some of which complete a group, and cut again."""
    plain, drafting = Lived(layout), Lived(layout)
    plain.write({0: 5})
    drafting.write({0: 5})
    rng = random.Random(0)
    for length in range(6, 50):
        drafting.write({0: 1 + rng.randint(0, 3)}, captured=rng.random() < 0.5, shift=9.0)
        drafting.truncate(0, length - 1)
        for each in (plain, drafting):
            each.write({0: 1})
        assert _equal(plain.read(0), drafting.read(0)), length


def test_a_cut_below_the_tail_is_refused() -> None:
    lived = Lived(SMALL)
    lived.write({0: 30})
    lived.truncate(0, 30 - 4)
    with pytest.raises(Unsupported, match="raise residual_length"):
        lived.truncate(0, 15)
    lived.truncate(0, 0)


def test_tokens_written_one_by_one_overwrite_the_tail_too() -> None:
    space = SMALL.space(SMALL.shape((GROUP,), KVBudget(1, 64, 4)))
    assert space.reserve(0, 16)
    for length in range(16, 32):
        assert space.reserve_next([next_token(0, length)]) == 1
        space.place(0, length, length + 1)
    with pytest.raises(Unsupported, match="cannot cut sequence 0 from 32 to 15 tokens"):
        space.truncate(0, 15)
    space.truncate(0, 32 - 4)
    assert space.fork(0, 1, 20) is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_forks_go_their_own_ways(layout: Any) -> None:
    lived, alone = Lived(layout), Lived(layout)
    lived.write({0: 21})
    alone.write({0: 21})
    pairs = lived.space.fork(0, 1)
    assert pairs is not None
    lived.store.copy(pairs)
    lived.lengths[1] = 21
    assert _equal(lived.read(0), lived.read(1))
    lived.k[1, :21], lived.v[1, :21] = lived.k[0, :21], lived.v[0, :21]
    alone.write({0: 20})
    for _ in range(20):
        lived.write({1: 1, 0: 1})
    assert _equal(lived.read(0), alone.read(0))
    assert not torch.equal(lived.read(0)[0][21:], lived.read(1)[0][21:])


@pytest.mark.parametrize(
    ("layout", "bound"), list(zip(LAYOUTS, (0.01, 0.04, 0.07, 0.33, 0.07), strict=True)), ids=IDS
)
def test_what_is_lost(layout: Any, bound: float) -> None:
    lived = Lived(layout)
    lived.write({0: 60})
    keys, values = lived.read(0)
    for read, written in ((keys, lived.k[0, :60]), (values, lived.v[0, :60])):
        error = float((read - written).norm() / written.norm())
        assert 0.001 < error < bound


def test_a_large_key_channel_costs_the_others_nothing_in_kivi() -> None:
    """What the arrangement is for: per token, the same channel costs the others all their bits."""
    errors = {}
    for name, layout in (("kivi", SMALL), ("per token", QuantizedLayout("int8", 4))):
        lived = Lived(layout)
        lived.k[..., 3] += 1000
        lived.write({0: 60})
        others = [channel for channel in range(16) if channel != 3]
        difference = (lived.read(0)[0] - lived.k[0, :60])[..., others]
        errors[name] = float(difference.norm() / lived.k[0, :60][..., others].norm())
    assert errors["kivi"] < 0.1
    assert errors["per token"] > 0.5


def test_recent_tokens_are_exact_in_kivi() -> None:
    lived, rule = Lived(SMALL), KiviRule(4, 12)
    lived.write({0: 50})
    first = rule.num_flushed(50)
    assert 50 - first in range(rule.num_recent, rule.max_tail + 1)
    keys, _ = lived.read(0)
    assert torch.equal(keys[first:], lived.k[0, first:50])
    assert not torch.equal(keys[first - 1], lived.k[0, first - 1])


H200 = MachineFacts("cuda", "NVIDIA H200", 141 << 30, 132, compute_capability=90)
A100 = MachineFacts("cuda", "NVIDIA A100", 80 << 30, 108, compute_capability=80)


def _match(attention: str, kv: str, machine: MachineFacts, **options: Any) -> Any:
    catalogue = load_catalogue()
    choices = {}
    for role, name, given in ((Role.ATTENTION, attention, {}), (Role.KV, kv, options)):
        registered = catalogue.find(role, name)
        choices[role] = Choice(registered, registered.component.options(**given))
    return match(choices, (), replace(example_model(), dtype="bfloat16"), machine)


def test_triton_reads_quantized_blocks_in_place_and_others_through_the_gather() -> None:
    assert [dict(_match("triton", kv, H200).adapters) for kv in ("quantized", "kivi")] == [{}, {}]
    short = {"group_size": 4, "block_size": 16}
    assert dict(_match("triton", "kivi", H200, **short).adapters) == {"view:dense": "gather"}
    for attention, kv in (("sdpa", "quantized"), ("eager", "kivi")):
        found = _match(attention, kv, H200)
        assert (found.problems, dict(found.adapters)) == ((), {"view:dense": "gather"})


def test_fp8_needs_a_device_that_has_it() -> None:
    (problem,) = _match("sdpa", "quantized", A100, dtype="fp8").problems
    assert problem == "kv 'quantized' needs sm:89, this cell runs on cuda (NVIDIA A100)"
    assert _match("sdpa", "quantized", A100, dtype="int8").problems == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block_size": 48, "group_size": 32}, "block_size 48 is not a multiple of group_size 32"),
        ({"residual_length": 63}, "residual_length 63 is too small"),
    ],
)
def test_options_that_do_not_fit_each_other(given: dict[str, int], message: str) -> None:
    options = load_catalogue().find(Role.KV, "kivi").component.options
    with pytest.raises(ValueError, match=message):
        options(**given)


def test_heads_that_do_not_divide_into_groups() -> None:
    with pytest.raises(UserError, match="group_size 32 of kv 'kivi' does not divide the 80 channels") as caught:
        KiviLayout(4, 32, 128, 32).shape((KVGroup((0,), 2, 80, 80),), KVBudget(1, 64, 2))
    assert caught.value.key == "parts.kv.group_size"
    assert "16" in (caught.value.hint or "")
