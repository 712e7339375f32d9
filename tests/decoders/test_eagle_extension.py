"""The layer's pass over new pairs, padded to few shapes, leaves what one of their own shape does, and only that."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from decoding import generate, requests
from infermix.engine import assembly
from infermix.roles.request import Request, Sequence
from infermix_decoders.eagle_cache import EagleCache
from infermix_decoders.eagle_extension import FEW, Extension, PaddedExtensions, Pairs, PlainExtensions, numbers_of
from infermix_decoders.eagle_layer import EagleDraft, EagleShape
from infermix_decoders.eagle_rounds import PaddedRounds, RoundShapes
from infermix_decoders.lane_rows import LaneRows
from torch import Tensor, nn
from watched_rounds import EAGLE, Recorder, count_runs

Build = Callable[..., Any]
CPU = torch.device("cpu")
SHAPE = EagleShape(32, 48, 4, 2, 8, rope_theta=10000.0, eps=1e-6, bias=True)
LANES, CAPACITY, VOCABULARY, MOST = 6, 64, 50, 5
HIDDEN = torch.randn(40, SHAPE.width, generator=torch.Generator().manual_seed(3))


def made_extension() -> Extension:
    """Over random weights and a cache full of random pairs."""
    torch.manual_seed(5)
    draft = EagleDraft(SHAPE).requires_grad_(False)
    embed = nn.Embedding(VOCABULARY, SHAPE.width).requires_grad_(False)
    cache = EagleCache(LANES, CAPACITY, SHAPE.num_kv_heads, SHAPE.head_dim, torch.zeros(1), spare=FEW)
    for pool in cache.pools:
        pool.normal_()
    latest = LaneRows(LANES + 1, SHAPE.width, CPU, torch.float32)
    latest._rows.normal_()
    return Extension(draft, embed, cache, latest)


def padded_extensions(extension: Extension, shapes: RoundShapes) -> PaddedExtensions:
    """Beside rounds that nobody asks."""
    rounds = PaddedRounds(cast("Any", None), shapes, CPU, numbers_of(MOST))
    return PaddedExtensions(extension, rounds, MOST)


def new_pairs(*, lane: int, count: int, seen: int, start: int) -> Pairs:
    sequence = Sequence(lane, Request(request_id=str(lane), prompt_ids=(1,)), [1], 1, lane=lane)
    rows = [7 * lane + index for index in range(count)]
    return Pairs(sequence, rows, [lane + 3 * index for index in range(count)], start, seen, ended=True)


GROUPS: list[list[Pairs]] = [
    [new_pairs(lane=3, count=2, seen=9, start=11)],
    [new_pairs(lane=4, count=1, seen=0, start=0), new_pairs(lane=1, count=5, seen=30, start=30)],
    [new_pairs(lane=lane, count=1 + lane % MOST, seen=8 * lane, start=9 * lane) for lane in (5, 2, 4, 1, 3)],
]


def left_by(extension: Extension, group: Seq[Pairs]) -> list[Tensor]:
    """What is kept of the group: keys, values, features."""
    cache = extension.cache
    kept = [pool[pairs.sequence.lane, : pairs.seen + len(pairs.rows)] for pool in (cache.keys, cache.values)
            for pairs in group]  # fmt: skip
    return [*kept, *[extension.latest._rows[pairs.sequence.lane] for pairs in group]]


@pytest.mark.parametrize("group", GROUPS, ids=len)
def test_padding_leaves_what_plain_passes_leave(group: list[Pairs]) -> None:
    plain, padded = made_extension(), made_extension()
    PlainExtensions(plain)(group, HIDDEN)
    padded_extensions(padded, RoundShapes((1, 8), (16, CAPACITY)))(group, HIDDEN)
    for one, two in zip(left_by(plain, group), left_by(padded, group), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group", GROUPS, ids=len)
def test_padding_leaves_others_alone(group: list[Pairs]) -> None:
    """Lanes that are not among the group's, and what its own lanes have seen before."""
    extension = made_extension()
    cache, latest = extension.cache, extension.latest
    before = cache.keys.clone(), cache.values.clone(), latest._rows.clone()
    padded_extensions(extension, RoundShapes((8,), (CAPACITY,)))(group, HIDDEN)
    seen = {pairs.sequence.lane: pairs.seen for pairs in group}
    for was, now in zip(before[:2], (cache.keys, cache.values), strict=True):
        for lane in range(LANES):
            assert was[lane, : seen.get(lane, CAPACITY)].equal(now[lane, : seen.get(lane, CAPACITY)])
    for lane in set(range(LANES)) - set(seen):
        assert before[2][lane].equal(latest._rows[lane])


def test_a_pass_depends_on_its_own_rows_alone() -> None:
    """Neither on what a larger pass left where it is written next, nor on what lies behind the pairs."""
    fresh, used = made_extension(), made_extension()
    shapes = RoundShapes((8,), (CAPACITY,))
    passes = [padded_extensions(each, shapes) for each in (fresh, used)]
    passes[1](GROUPS[2], HIDDEN)
    for cache in (fresh.cache, used.cache):
        cache.keys[:], cache.values[:] = 0.5, -0.5
        cache.keys[3, 9:], cache.values[0] = (7.0 if cache is used.cache else -7.0), float("nan")
    for each in passes:
        each(GROUPS[0], HIDDEN)
    for one, two in zip(left_by(fresh, GROUPS[0]), left_by(used, GROUPS[0]), strict=True):
        assert one.equal(two)


@dataclass
class Compared:
    """Hands on to `padded`, and compares what it leaves with what a plain pass left before that was undone."""

    padded: Any
    batches: list[int] = field(default_factory=list)

    @property
    def most(self) -> int:
        return int(self.padded.most)

    def __call__(self, group: Seq[Pairs], hidden: Tensor) -> None:
        extension = self.padded.extension
        pools = (*extension.cache.pools, extension.latest._rows)
        before = [pool.clone() for pool in pools]
        PlainExtensions(extension)(group, hidden)
        plain = [each.clone() for each in left_by(extension, group)]
        for pool, was in zip(pools, before, strict=True):
            pool.copy_(was)
        self.padded(group, hidden)
        for one, two in zip(plain, left_by(extension, group), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
        self.batches.append(len(group))


@pytest.mark.parametrize("chunked", [False, True])
def test_replayed_passes_in_an_engine(build_engine: Build, monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    """Prompts in chunks that end here or there, branches of all lengths, batches that shrink; nothing runs plain but
    prompts.
    """
    recorder = Recorder()
    monkeypatch.setattr(assembly, "DecoderCapture", lambda build: recorder)
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 9, "chunked": True} if chunked else {"max_num_seqs": 8}
    parts = {"scheduler": ("continuous", given)}
    wanted = requests({"temperature": 0.7}, count=9)
    plain = generate(build_engine(parts=parts), wanted)
    engine = build_engine(parts={**parts, "decoder": EAGLE})
    drafter = engine._decoder._drafter
    runs = count_runs(drafter._together)
    compared = drafter._together = Compared(drafter._together)
    assert generate(engine, wanted) == plain
    assert len(compared.batches) == len(runs) > 20
    assert engine.report().counters["accepted_draft_tokens"] > 0
    assert any(batch != size for batch, (size, _) in zip(compared.batches, runs, strict=True)), "no batch was padded"


def test_without_graphs_short_prompts_are_computed_together(build_engine: Build) -> None:
    drafter = build_engine(parts={"decoder": EAGLE})._decoder._drafter
    assert drafter._together is drafter._alone
    assert drafter._together.most == FEW
