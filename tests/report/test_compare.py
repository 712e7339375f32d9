"""Differences with their noise, `--fail-if`, and the exit codes of `infermix compare`."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pytest
from infermix.commands import compare as command
from infermix.errors import UserError
from infermix.record.record import QualityRecord, Record
from infermix.record.store import write_record
from infermix.report.cells import load_side, match
from infermix.report.compare import Difference, compare
from infermix.report.limits import parse_fail_if

SPEED = "output_tokens_per_s"


def speed_of(a: list[Record], b: list[Record]) -> Difference:
    (found,) = compare(a, b, [SPEED])
    return found


def test_clear_difference(make_record) -> None:
    found = speed_of([make_record([100, 101, 99])], [make_record([90, 91, 89])])
    assert found.relative == pytest.approx(-0.1, abs=1e-3)
    assert found.low is not None
    assert found.high is not None
    assert found.low < -0.1 < found.high < 0
    assert (found.outcome, found.method, found.samples) == ("worse", "repeats", (3, 3))


def test_noise_is_no_difference_and_says_what_would_have_been_seen(make_record) -> None:
    found = speed_of([make_record([100, 110, 90])], [make_record([101, 111, 91])])
    assert found.outcome == "no significant difference"
    assert found.detectable is not None
    assert found.detectable > 0.2


def test_direction_decides_what_is_better(make_record) -> None:
    (found,) = compare([make_record([100, 101])], [make_record([200, 201])], ["ttft_s_p50"])
    assert found.relative < 0
    assert found.outcome == "better"


@pytest.mark.parametrize("repeats", [3, 5, 10])
def test_false_alarms_come_at_the_stated_rate(make_record, repeats: int) -> None:
    rng = random.Random(repeats)
    trials = 600

    def draw() -> list[Record]:
        return [make_record([rng.lognormvariate(0, 0.03) for _ in range(repeats)])]

    alarms = sum(speed_of(draw(), draw()).significant for _ in range(trials))
    assert 0.01 * trials <= alarms <= 0.086 * trials  # 5 % plus four standard deviations; Welch is cautious at n = 3


def test_the_detectable_effect_is_seen_four_times_in_five(make_record) -> None:
    rng = random.Random(7)

    def draw(mean: float) -> list[Record]:
        return [make_record([mean * rng.lognormvariate(0, 0.02) for _ in range(6)])]

    sizes = [speed_of(draw(1), draw(1)).detectable or 0 for _ in range(200)]
    size = sum(sizes) / len(sizes)
    seen = sum(speed_of(draw(1), draw(1 + size)).significant for _ in range(400))
    assert 0.72 <= seen / 400 <= 0.9


def test_interleaved_runs_are_compared_in_pairs(make_record) -> None:
    drifting = [100.0, 120.0, 140.0]
    base = make_record(drifting, {"kv": "dense"}, run_id="base")
    turn = make_record([value * 1.05 for value in (101, 119, 141)], run_id="turn")
    assert not speed_of([base], [turn]).significant
    turn.paired = {"mode": "alternating", "baseline": "base", "baseline_samples": {SPEED: drifting}}
    found = speed_of([base], [turn])
    assert (found.method, found.outcome) == ("paired repeats", "better")
    assert found.relative == pytest.approx(0.05, abs=0.01)
    back = speed_of([turn], [base])
    assert (back.method, back.outcome) == ("paired repeats", "worse")


def test_turns_with_another_run_do_not_pair(make_record) -> None:
    base, turn = make_record([100, 101], run_id="new"), make_record([100, 101], run_id="turn")
    turn.paired = {"mode": "alternating", "baseline": "old", "baseline_samples": {SPEED: [1, 2]}}
    assert speed_of([base], [turn]).method == "repeats"


def test_several_runs_are_compared_by_run(make_record) -> None:
    a = [make_record([value, value, value], run_id=f"a{value}") for value in (100, 110, 90)]
    b = [make_record([value, value, value], run_id=f"b{value}") for value in (95, 105, 115)]
    found = speed_of(a, b)
    assert (found.method, found.samples) == ("runs", (3, 3))
    assert not found.significant


def test_single_values_claim_nothing(make_record) -> None:
    (found,) = compare([make_record()], [make_record(memory={"peak_bytes": 6e8})], ["peak_bytes"])
    assert (found.outcome, found.method) == ("no interval", "single values")
    assert found.relative == pytest.approx(0.2)
    assert speed_of([make_record([100.0])], [make_record([100.0])]).outcome == "equal"


def quality(value: float, samples: list[float]) -> dict[str, QualityRecord]:
    return {"perplexity[x]": QualityRecord(value=value, unit="", better="lower", samples=samples)}


def test_quality_is_compared_item_by_item(make_record) -> None:
    rng = random.Random(1)
    base = [rng.gauss(2.7, 0.5) for _ in range(50)]
    a = make_record(quality=quality(14.7, base))
    worse = make_record(quality=quality(14.9, [x + rng.gauss(0.0135, 0.01) for x in base]))
    same = make_record(quality=quality(14.71, [x + rng.gauss(0, 0.01) for x in base]))
    (found,) = compare([a], [worse], ["perplexity[x]"])
    assert (found.method, found.outcome) == ("paired samples", "worse")
    (found,) = compare([a], [same], ["perplexity[x]"])
    assert found.outcome == "no significant difference"


def test_rise_from_zero(make_record) -> None:
    a, b = make_record(memory={"x": 0.0}), make_record(memory={"x": 1.0})
    (found,) = compare([a], [b], ["x"])
    assert found.relative == float("inf")


def test_unknown_metric(make_record) -> None:
    with pytest.raises(UserError, match="did you mean 'output_tokens_per_s'"):
        compare([make_record()], [make_record()], ["output_token_per_s"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "speed",
        "a<b",
        "x<-5",
        "x<=-5%",
        "x<5%",
        "x>5%",
        "x<+5%",
        "x>-5%",
        "x<-5%%",
        "<-5%",
        "x<--5%",
        "x < - 5 %",
        "x<-1e2%",
    ],
)
def test_fail_if_is_strict(text: str) -> None:
    with pytest.raises(UserError, match="METRIC<-PERCENT%"):
        parse_fail_if(text)


def test_fail_if_parses() -> None:
    assert parse_fail_if("tpot_s_p99>+2.5%").limit == pytest.approx(0.025)
    assert parse_fail_if(" x < -5 % ").metric == "x"
    assert parse_fail_if("perplexity[a,b]>0%").limit == 0


@pytest.mark.parametrize(
    ("b", "fires"),
    [([90, 91, 89], True), ([97, 98, 96], False), ([60, 90, 120], False), ([110, 111, 109], False)],
    ids=["beyond", "significant but small", "noisy", "faster"],
)
def test_fail_if_fires_only_beyond_noise_and_limit(make_record, b: list[float], fires: bool) -> None:
    found = speed_of([make_record([100, 101, 99])], [make_record(b)])
    assert parse_fail_if("output_tokens_per_s<-5%").fires(found) is fires


def test_match_by_digest_then_name(make_record) -> None:
    a = [make_record(parts={"kv": name}, cell=name) for name in ("x", "y", "gone")]
    b = [
        make_record(parts={"kv": "x"}, cell="x"),
        make_record(cell="y", cell_digest="other"),
        make_record(cell="new"),
    ]
    sides = match(a, b)
    assert [pair.name for pair in sides.pairs] == ["x", "y"]
    assert (sides.only_a, sides.only_b) == (["gone"], ["new"])


def test_load_side(make_record, tmp_path: Path) -> None:
    path = write_record(make_record(), tmp_path)
    (tmp_path / "bad.json").write_text("{")
    for pattern in (path, tmp_path, f"{tmp_path}/demo-*.json"):
        records, _ = load_side(str(pattern))
        assert len(records) == 1
    assert "bad.json" in load_side(str(tmp_path))[1][0]
    with pytest.raises(UserError, match="no complete record"):
        load_side(str(tmp_path / "nothing-*.json"))
    with pytest.raises(UserError, match="not JSON"):
        load_side(str(tmp_path / "bad.json"))


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.execute(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def store(make_record, tmp_path: Path):
    def keep(name: str, *records: Record) -> Path:
        for record in records:
            write_record(record, tmp_path / name)
        return tmp_path / name

    return keep


def test_exit_codes(make_record, store, capsys) -> None:
    a = store("a", make_record([100, 101, 99]))
    slow = store("slow", make_record([80, 81, 79]))
    elsewhere = store("elsewhere", make_record([100, 101, 99], device="cuda"))
    rule = "output_tokens_per_s<-5%"
    assert run(a, slow) == 0
    assert run(a, a, "--fail-if", rule) == 0
    assert run(a, slow, "--fail-if", rule) == 1
    assert "output_tokens_per_s<-5% holds" in capsys.readouterr().err
    assert run(slow, a, "--fail-if", rule) == 0
    assert run(a, slow, "--fail-if", "output_tokens_per_s<5%") == 2
    assert run(a, slow, "--fail-if", "speed<-5%") == 2
    assert run(a, slow, "--metric", "speed") == 2
    assert run(a, "nowhere") == 2
    assert run(a, elsewhere) == 3
    assert "--force" in capsys.readouterr().err
    assert run(a, elsewhere, "--force") == 0


def test_metrics_that_were_not_asked_for_are_still_judged(make_record, store) -> None:
    a, slow = store("a", make_record([100, 101, 99])), store("b", make_record([80, 81, 79]))
    assert run(a, slow, "--metric", "peak_bytes", "--fail-if", "output_tokens_per_s<-5%") == 1


def test_a_cell_that_broke_or_vanished_fails_the_build(make_record, store, capsys) -> None:
    good = [make_record([100, 101]), make_record([100, 101], {"kv": "dense"})]
    broken = [good[0], make_record(None, {"kv": "dense"}, state="oom", reason="no memory")]
    a, b, c = store("a", *good), store("b", *broken), store("c", good[0])
    rule = ["--fail-if", "output_tokens_per_s<-5%"]
    assert run(a, b) == 0
    assert run(a, b, *rule) == 1
    assert "B is oom: no memory" in capsys.readouterr().err
    assert run(a, c, *rule) == 1
    assert "B has no such cell" in capsys.readouterr().err
    assert run(c, a, *rule) == 0


def test_no_cell_in_common(make_record, store) -> None:
    a = store("a", make_record(), make_record(parts={"kv": "x"}))
    b = store("b", make_record(parts={"kv": "y"}), make_record(parts={"kv": "z"}))
    assert run(a, b) == 3


def test_a_metric_missing_on_one_side_fails(make_record, store) -> None:
    a, b = store("a", make_record()), store("b", make_record(memory={}))
    assert run(a, b, "--fail-if", "peak_bytes>+5%") == 1
