"""What a replay ranks is what a launch does, and few operators are launched beside it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.engine import assembly
from infermix.measure.drive import drive
from infermix.roles.request import Request, SamplingParams
from infermix_decoders.beam_ranking import Best, Ranking, rank, rated
from watched_rounds import Recorder, count_runs

sys.path.insert(0, str(Path(__file__).parent.parent / "bench" / "limits"))

from decoder_overhead import OwnLaunches

Build = Callable[..., Any]
BEAMS, VOCABULARY = 3, 50


def captured(counts: tuple[int, ...] = (6,), most: int = 5) -> Ranking:
    ranking = Ranking(BEAMS, counts, most, VOCABULARY, "cpu", torch.float32)
    list(ranking.capture_all(Recorder()))
    return ranking


def lists(best: Best, count: int) -> list[Any]:
    return [list(each) for each in best.read(count)]


def test_a_replay_ranks_what_a_launch_does() -> None:
    """Few groups behind many, and scores that lie on the device already."""
    torch.manual_seed(1)
    ranking = captured()
    assert ranking.batches == (1, 2, 4, 5)
    before = [-float(row) / 7 for row in range(5 * BEAMS)]
    for num_groups in (5, 5, 2, 3, 3, 3):
        logits, before = torch.randn(num_groups * BEAMS, VOCABULARY), before[: num_groups * BEAMS]
        before += [-1.0] * (num_groups * BEAMS - len(before))
        scores = torch.tensor(before)[:, None]
        expected = Best(num_groups, rank(rated(logits), scores, num_groups, 6)[0], 6, lambda scores: None)
        found = ranking.replay(logits, before, num_groups, 6)
        best = lists(expected, BEAMS)
        assert lists(found, BEAMS) == best
        assert [found.all_of(group) for group in range(num_groups)] == [
            expected.all_of(group) for group in range(num_groups)
        ]
        before = [score for own, _, _ in best for score in own]


def test_scores_that_nobody_read_are_written_again() -> None:
    ranking, logits = captured(), torch.randn(BEAMS, VOCABULARY)
    before = [-1.0, -2.0, -3.0]
    once = lists(ranking.replay(logits, before, 1, 6), BEAMS)
    ranking.replay(logits, [-9.0, -8.0, -7.0], 1, 6)  # its step was dropped
    assert lists(ranking.replay(logits, before, 1, 6), BEAMS) == once


def test_what_is_not_replayed() -> None:
    ranking, logits = captured(), torch.zeros(BEAMS, VOCABULARY)
    assert ranking.replays(logits, 1, BEAMS, 6)
    assert not ranking.replays(logits.double(), 1, BEAMS, 6)
    assert not ranking.replays(logits, 1, 1, 6)
    assert not ranking.replays(logits, 1, BEAMS, 9)
    assert not ranking.replays(logits, 6, BEAMS, 6)
    ranking.launch()
    assert not ranking.replays(logits, 1, BEAMS, 6)


def test_graphs_are_few_and_read_a_bounded_place() -> None:
    ranking = Ranking(4, (8, 16), 1 << 14, 1 << 17, "cpu", torch.float32)
    assert ranking.batches[-1] == 1 << 7
    assert 2 * len(ranking.batches) <= 12


def outputs(engine: Any) -> list[Any]:
    rng = random.Random(5)
    wanted = [
        Request(
            request_id=str(number), prompt_ids=tuple(rng.randrange(6, 96) for _ in range(rng.randint(1, 14))),
            sampling=SamplingParams(max_new_tokens=6 + number, num_outputs=2, **given),
        )
        for number, given in enumerate(
            [{}, {"ignore_eos": True}, {"stop_token_ids": tuple(range(30, 50))}, {"min_new_tokens": 4}] * 2
        )
    ]  # fmt: skip
    samples = drive(engine, wanted, None, keep_outputs=len(wanted)).requests
    assert not any(sample.error for sample in samples)
    return [[output.output_ids for output in sample.outputs] for sample in samples]


def test_outputs_are_those_of_launches(build_engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"decoder": ("beam", {"num_beams": BEAMS}), "kv": ("paged", {"block_size": 4})}
    plain = build_engine(parts=parts, max_num_seqs=12)
    told = plain.report().executed["decoder"]["graphs"]
    assert told == {"captured": 0, "reason": "steps run eagerly on cpu"}
    monkeypatch.setattr(assembly, "DecoderCapture", lambda build: Recorder())
    replaying = build_engine(parts=parts, max_num_seqs=12)
    assert replaying.report().executed["decoder"]["graphs"] == {"captured": 3, "groups": [1, 2, 4]}
    runs = count_runs(replaying._decoder._ranking)
    assert outputs(replaying) == outputs(plain)
    assert len(set(runs)) == 3
    counted, launched = replaying.report().counters, plain.report().counters
    assert counted["rankings_replayed"] == len(runs) > 0
    assert counted["rankings_launched"] > 0, "first steps, and stop tokens that come too early"
    assert launched["rankings_replayed"] == 0 < launched["rankings_launched"]


def test_operators_of_a_step(build_engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are brought to where a replay reads them; a step that forks copies blocks of keys and of values."""
    monkeypatch.setattr(assembly, "DecoderCapture", lambda build: Recorder())
    kv = ("paged", {"block_size": 4})
    engine = build_engine(parts={"decoder": ("beam", {"num_beams": BEAMS}), "kv": kv}, max_num_seqs=12)
    monkeypatch.setattr(engine._decoder._ranking, "run", hidden(engine._decoder._ranking))
    for number in range(3):
        sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
        engine.submit(Request(request_id=str(number), prompt_ids=tuple(range(6, 16 + number)), sampling=sampling))
    for _ in range(3):
        engine.step()
    own, seen = OwnLaunches(engine), set()
    for _ in range(8):
        before = len(own.names)
        engine.step()
        seen.add(tuple(own.names[before:]))
    own.detach()
    copies = ("aten.index_select.default", "aten.index_copy_.default") * 2
    assert (*copies, "aten.copy_.default") in seen
    assert seen <= {(*copies, "aten.copy_.default"), ("aten.copy_.default",)}


def hidden(ranking: Ranking) -> Callable[..., Any]:
    """A replay is one launch, whatever is inside."""
    run = ranking.run

    def quiet(*shape: int) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return run(*shape)

    return quiet
