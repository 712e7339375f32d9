"""Interleaving a cell with its baseline: the order of repeats, and what the record says about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import infermix
import pytest
from infermix import interleave
from infermix.record.record import Record

REPEATS = 4


@pytest.fixture
def turns(experiment: Callable[..., Path], plugin: str, tmp_path: Path) -> Callable[..., tuple[list[Record], str]]:
    def go(**engine: Any) -> tuple[list[Record], str]:
        journal = tmp_path / "journal"
        path = experiment(
            engine={"use": "fake", "journal": str(journal), **engine},
            measure={"repeats": REPEATS, "max_warmup": 1, "interleave": True},
            sweep={"engine.letter": ["A", "B"]},
            baseline={"engine.letter": "A"},
        )
        records = infermix.run(path, out=tmp_path / "out", ceilings=False, extra_plugins=[plugin])
        return records, journal.read_text()

    return go


def test_both_alive_take_turns_abba(turns: Callable[..., tuple[list[Record], str]]) -> None:
    (baseline, candidate), journal = turns()
    # The baseline alone (one warm-up), then one warm-up of each and the turns.
    assert journal == "A" + "A" * REPEATS + "AB" + "ABBAABBA"
    assert not baseline.paired
    assert candidate.paired["mode"] == "alternating"
    assert candidate.paired["order"] == "ABBAABBA"
    assert candidate.paired["baseline"] == baseline.run_id
    assert len(candidate.paired["baseline_samples"]["output_tokens_per_s"]) == REPEATS
    ratio = candidate.paired["ratios"]["output_tokens_per_s"]
    assert ratio["pairs"] == REPEATS
    assert ratio["low"] < ratio["ratio"] < ratio["high"]


def test_without_room_for_both_the_baseline_comes_before_and_after(
    turns: Callable[..., tuple[list[Record], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleave, "both_fit", lambda candidate, baseline: False)
    (_, candidate), journal = turns()
    assert journal == "A" + "A" * REPEATS + "AAA" + "BBBBB" + "AAA"
    assert candidate.paired["mode"] == "by process"
    assert candidate.paired["order"] == "AABBBBAA"
    assert len(candidate.paired["baseline_samples"]["output_tokens_per_s"]) == REPEATS
