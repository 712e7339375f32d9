"""Rounds of guessing that are padded to few shapes, and replayed, find the trees of those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import generate, requests
from infermix.engine import assembly
from infermix.roles.request import Request, SamplingParams
from infermix_decoders.eagle_cache import EagleCache, masked_attention
from infermix_decoders.eagle_layer import EagleDraft, EagleShape
from infermix_decoders.eagle_round import GuessingRound
from infermix_decoders.eagle_rounds import MOST_GRAPHS, PaddedRounds, PlainRounds, RoundShapes
from infermix_decoders.lane_rows import LaneRows
from torch import nn
from watched_rounds import EAGLE, Recorder, compare, count_runs, lists_of, plain_rounds

Build = Callable[..., Any]
CPU = torch.device("cpu")
#: Shapes small enough that rounds of the tests below differ in theirs.
BATCHES, REACHES = (2, 3, 8), (16, 24, 40)


def padded_rounds(guess: Any) -> PaddedRounds:
    return PaddedRounds(guess, RoundShapes(BATCHES, (*REACHES, guess._cache.capacity)), CPU)


SCHEDULERS: list[Any] = [
    ("continuous", {"max_num_seqs": 8}),
    ("continuous", {"max_num_seqs": 3, "max_num_batched_tokens": 9, "chunked": True}),
    ("static", {"batch_size": 5}),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda each: "-".join(map(str, (each[0], *each[1].values()))))
def test_padding_changes_no_tree(build_engine: Build, scheduler: Any) -> None:
    engine = build_engine(parts={"decoder": EAGLE, "scheduler": scheduler})
    compared = compare(engine, padded_rounds)
    generate(engine, requests({"temperature": 0.7}, count=9))
    assert compared.different == 0
    assert compared.trees > 30
    assert set(compared.batches) - set(BATCHES), "no batch was padded"
    assert any(len(set(counts)) > 1 for counts in compared.counts), "texts of the same length only"


def test_padding_under_preemption(build_engine: Build) -> None:
    """Lanes change hands, and rows of the cache hold what others have left there."""
    engine = build_engine(
        parts={"decoder": EAGLE, "kv": ("paged", {"block_size": 4}), "scheduler": "continuous"},
        max_model_len=44,
        kv_memory_bytes=12 * 4 * 2 * 2 * 2 * 16 * 4,
    )
    compared = compare(engine, padded_rounds)
    generate(engine, requests({"temperature": 0.8}))
    assert engine.report().counters["preemptions"] > 0
    assert compared.different == 0
    assert compared.trees > 20


def test_padding_up_to_the_longest_text(build_engine: Build) -> None:
    """The last guesses lie in the last places of the cache."""
    engine = build_engine(parts={"decoder": EAGLE}, max_model_len=40)
    compared = compare(engine, padded_rounds)
    texts = [
        Request(
            request_id=str(length),
            prompt_ids=tuple(range(6, 6 + length)),
            sampling=SamplingParams(max_new_tokens=40 - length, ignore_eos=True),
        )
        for length in (12, 14, 17)
    ]
    generate(engine, texts)
    most, room = max(map(max, compared.counts)), compared.guess.room
    assert most + room > max(size for size in REACHES if size < compared.guess._cache.capacity)
    assert most >= 36
    assert compared.different == 0


def test_replayed_rounds_give_the_tokens_of_plain_decoding(
    build_engine: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shape is captured when the decoder is built, none later."""
    recorder = Recorder()
    monkeypatch.setattr(assembly, "DecoderCapture", lambda build: recorder)
    wanted = requests({"temperature": 0.7})
    plain = generate(build_engine(), wanted)
    engine = build_engine(parts={"decoder": EAGLE})
    told = engine.report().executed["decoder"]["graphs"]
    assert told == {"captured": 8, "batches": [1, 2, 4, 8], "reaches": [128 + 16]}
    assert recorder.captured == 8
    assert recorder.replayed == 0
    compared = compare(engine, plain_rounds)
    extensions = count_runs(engine._decoder._drafter._together)
    assert generate(engine, wanted) == plain
    assert compared.different == 0
    assert len(compared.batches) > 10
    assert len(extensions) >= len(compared.batches)
    assert recorder.replayed == len(compared.batches) + len(extensions)
    assert recorder.captured == 8


def test_why_rounds_are_not_captured_is_on_record(build_engine: Build) -> None:
    engine = build_engine(parts={"decoder": EAGLE})
    told = engine.report().executed["decoder"]["graphs"]
    assert told == {"captured": 0, "reason": "steps run eagerly on cpu"}
    assert isinstance(engine._decoder._drafter._rounds, PlainRounds)


SHAPE = EagleShape(32, 48, 4, 2, 8, rope_theta=10000.0, eps=1e-6, bias=True)
LANES, CAPACITY, VOCABULARY = 6, 64, 50


def made_round(beam: int = 3, depth: int = 4, num_nodes: int = 20) -> GuessingRound:
    """Over random weights and a cache full of random pairs."""
    torch.manual_seed(5)
    draft = EagleDraft(SHAPE).requires_grad_(False)
    embed, head = nn.Embedding(VOCABULARY, SHAPE.width), nn.Linear(SHAPE.width, VOCABULARY, bias=False)
    cache = EagleCache(LANES, CAPACITY, SHAPE.num_kv_heads, SHAPE.head_dim, torch.zeros(1))
    cache.keys.normal_()
    cache.values.normal_()
    latest = LaneRows(LANES, SHAPE.width, CPU, torch.float32)
    latest._rows.normal_()
    return GuessingRound(
        draft, embed.requires_grad_(False), head.requires_grad_(False), cache, latest,
        beam=beam, depth=depth, num_nodes=num_nodes,
    )  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("lanes", [[3], [4, 1], [5, 2, 4, 1, 3]], ids=len)
def test_padding_reads_nothing_of_others(lanes: list[int], depth: int) -> None:
    """Rows of padding have a lane that is poisoned, and their own trees are nobody's."""
    guess = made_round(depth=depth, num_nodes=3 if depth == 1 else 12)
    counts, positions = [1 + 7 * lane for lane in lanes], [4 + 9 * lane for lane in lanes]
    wanted = lists_of(PlainRounds(guess, CPU)(lanes, counts, positions))
    for unseen in (guess._cache.keys, guess._cache.values, guess._latest._rows):
        unseen[0] = float("nan")
    rounds = PaddedRounds(guess, RoundShapes((8,), (CAPACITY,)), CPU)
    assert lists_of(rounds(lanes, counts, positions)) == wanted


def test_a_tree_depends_on_what_was_seen_alone() -> None:
    """What lies behind the pairs of a row is left over from others."""
    guess = made_round()
    rounds, given = PlainRounds(guess, CPU), ([1, 2], [9, 30], [9, 30])
    wanted = lists_of(rounds(*given))
    assert lists_of(rounds([1, 2], [8, 30], [9, 30])) != wanted
    for pool in (guess._cache.keys, guess._cache.values):
        pool[1, 9:], pool[2, 30:], pool[3] = 7.0, -7.0, 9.0
    assert lists_of(rounds(*given)) == wanted


@pytest.mark.parametrize(("max_num_seqs", "capacity"), [(1, 40), (8, 300), (64, 2360), (96, 8192), (256, 131104)])
def test_shapes_are_few_and_hold_every_round(max_num_seqs: int, capacity: int) -> None:
    shapes = RoundShapes.up_to(max_num_seqs, capacity)
    assert len(shapes.batches) * len(shapes.reaches) <= MOST_GRAPHS
    assert shapes.batches[0] == 1
    for rows, places in ((1, 1), (max_num_seqs, 1), (max_num_seqs // 2 + 1, capacity // 2), (max_num_seqs, capacity)):
        batch, reach = shapes.holding(rows, places)
        assert rows <= batch <= max_num_seqs
        assert places <= reach <= capacity


def test_powers_of_two_where_they_are_few_enough() -> None:
    assert RoundShapes.up_to(8, 600) == RoundShapes((1, 2, 4, 8), (256, 512, 600))
    assert RoundShapes.up_to(64, 2360) == RoundShapes((1, 4, 16, 64), (256, 1024, 2360))


def test_angles_that_are_looked_up_are_those_that_are_computed() -> None:
    torch.manual_seed(1)
    draft = EagleDraft(SHAPE).bfloat16()
    positions = torch.tensor([[0, 3, 40], [7, 7, 1]])
    computed = draft._angles(positions, torch.bfloat16)
    names = set(draft.state_dict())
    draft.tabulate(41)
    for one, two in zip(computed, draft._angles(positions, torch.bfloat16), strict=True):
        assert one.shape == two.shape == (2, 3, 1, SHAPE.head_dim)
        assert one.equal(two)
    assert set(draft.state_dict()) == names


@pytest.mark.parametrize("groups", [1, 3])
def test_heads_in_line_see_what_grouped_heads_see(groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 2 * groups, 8, generator=generator)
    keys, values = torch.randn(2, 2, 11, 2, 8, generator=generator)
    visible = torch.rand(2, 5, 11, generator=generator) < 0.5
    visible[..., 0] = True
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=visible[:, None], enable_gqa=True
    )
    torch.testing.assert_close(masked_attention(q, keys, values, visible), wanted.transpose(1, 2))


def test_no_plan_is_made_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN would make one; what others chose holds again afterwards."""
    attention, allowed = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*given: Any, **named: Any) -> torch.Tensor:
        allowed.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))
        return attention(*given, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    q, keys = torch.ones(1, 2, 4, 8), torch.ones(1, 3, 2, 8)
    masked_attention(q, keys, keys, torch.ones(1, 2, 3, dtype=torch.bool))
    assert allowed == [(False, True)]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
