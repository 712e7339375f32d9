"""Attribution recovers known factors, and says what it cannot know."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from infermix.record.record import PartRecord, Record
from infermix.report.effects import Effect, Effects, effects
from infermix.report.labels import mixes
from infermix.report.markdown import effects_markdown

SPEED = "output_tokens_per_s"
ATTENTION = {"eager": 1.0, "sdpa": 1.5, "triton": 2.0}
KV = {"dense": 1.0, "paged": 0.9}
QUANTIZER = {"none": 1.0, "rtn": 1.3}


def grid(make_record, interaction: float = 1.0, noise: float = 0.0, seed: int = 0) -> list[Record]:
    rng = random.Random(seed)
    found = []
    for (a, x), (k, y), (q, z) in itertools.product(ATTENTION.items(), KV.items(), QUANTIZER.items()):
        speed = 100 * x * y * z * (interaction if (a, q) == ("triton", "rtn") else 1.0)
        samples = [speed * (1 + noise * rng.gauss(0, 1)) for _ in range(4)]
        chosen = {"attention": a, "kv": k, "quantizer": q}
        found.append(make_record(samples, chosen, baseline=(a, k, q) == ("eager", "dense", "none")))
    return found


def attribute(records: list[Record]) -> Effects | None:
    return effects(list(zip(records, mixes(records), strict=True)), SPEED)


def known(found: Effects | None) -> Effects:
    assert found is not None
    return found


def of(found: Sequence[Effect], **levels: str) -> Effect:
    return next(effect for effect in found if dict(effect.levels) == levels)


def test_full_grid_without_noise(make_record) -> None:
    found = known(attribute(grid(make_record)))
    assert found.reference == {"attention": "eager", "kv": "dense", "quantizer": "none"}
    assert of(found.main, attention="triton").ratio == pytest.approx(2.0)
    assert of(found.main, kv="paged").ratio == pytest.approx(0.9)
    assert of(found.main, quantizer="rtn").ratio == pytest.approx(1.3)
    assert all(effect.ratio == pytest.approx(1.0) for effect in found.interactions)
    assert found.explained == pytest.approx(1.0)
    assert found.notes == ()


def test_interaction_is_recovered(make_record) -> None:
    found = known(attribute(grid(make_record, interaction=1.2)))
    assert of(found.interactions, attention="triton", quantizer="rtn").ratio == pytest.approx(1.2)
    assert of(found.interactions, attention="sdpa", quantizer="rtn").ratio == pytest.approx(1.0)
    assert of(found.main, attention="triton").ratio == pytest.approx(2.0 * 1.2**0.5)
    assert found.explained is not None
    assert found.explained < 1


def test_intervals_cover_the_truth_at_their_level(make_record) -> None:
    covered = 0
    for seed in range(200):
        found = known(attribute(grid(make_record, noise=0.03, seed=seed)))
        effect = of(found.main, attention="sdpa")
        assert effect.low is not None
        assert effect.high is not None
        covered += effect.low <= 1.5 <= effect.high
    assert 180 <= covered <= 199  # binomial(200, 0.95): four standard deviations


def test_one_change_at_a_time_estimates_no_interaction(make_record) -> None:
    changed: tuple[dict[str, str], ...] = ({}, {"attention": "sdpa"}, {"kv": "paged"})
    base = {"attention": "eager", "kv": "dense"}
    speeds = (100.0, 150.0, 90.0)
    records = [make_record([s, s], base | c, baseline=not c) for s, c in zip(speeds, changed, strict=True)]
    found = known(attribute(records))
    assert of(found.main, attention="sdpa").ratio == pytest.approx(1.5)
    assert [effect.ratio for effect in found.interactions] == [None]
    assert "3 of the 4 cells" in found.notes[0]
    text = "\n".join(effects_markdown(found))
    assert "1 interactions cannot be estimated" in text


def test_confounded_parts_are_not_estimable(make_record) -> None:
    records = [
        make_record([100, 101], {"attention": "a", "kv": "x"}),
        make_record([200, 201], {"attention": "b", "kv": "y"}),
    ]
    found = known(attribute(records))
    assert [effect.ratio for effect in found.main] == [None, None]
    assert "not estimable" in "\n".join(effects_markdown(found))


def test_a_missing_cell_leaves_the_rest_estimable(make_record) -> None:
    records = grid(make_record, interaction=1.2)
    del records[-1]
    found = known(attribute(records))
    assert of(found.interactions, attention="triton", quantizer="rtn").ratio == pytest.approx(1.2)


def test_single_repeats_give_no_interval(make_record) -> None:
    found = known(attribute([make_record([100.0], {"kv": "dense"}, baseline=True), make_record([150.0])]))
    (effect,) = found.main
    assert (effect.ratio, effect.low) == (pytest.approx(1.5), None)


def test_whole_engines_take_no_part(make_record) -> None:
    engine = make_record([500, 500], run_id="engine")
    engine.parts, engine.engine = {}, PartRecord(name="transformers")
    found = known(attribute([*grid(make_record), engine]))
    assert of(found.main, kv="paged").ratio == pytest.approx(0.9)
    assert "whole engines" in found.notes[0]


def test_nothing_to_attribute(make_record) -> None:
    assert attribute([]) is None
    assert attribute([make_record()]) is None
