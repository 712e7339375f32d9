"""Reading and publishing 10,000 records: under 10 s on a quiet machine. Run with `pytest tests/bench -m full`."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from infermix.record.record import Metric, PartRecord, QualityRecord, Record, Repeat, RequestSample
from infermix.record.store import complete_cells, scan_records, write_record
from infermix.report.leaderboard import leaderboard

pytest.importorskip("pytest_benchmark")

NUM_RECORDS = 10_000
LEVELS = {
    "attention": [f"attention{i}" for i in range(10)],
    "kv": [f"kv{i}" for i in range(10)],
    "quantizer": [f"quantizer{i}" for i in range(10)],
    "scheduler": [f"scheduler{i}" for i in range(10)],
}
METRICS = (
    "output_tokens_per_s",
    "requests_per_s",
    "ttft_s_p50",
    "ttft_s_p99",
    "tpot_s_p50",
    "tpot_s_p99",
    "e2e_s_p99",
)


def make_record(index: int, mix: tuple[str, ...], rng: random.Random) -> Record:
    sample = RequestSample(
        request_id="0",
        arrival_s=0.0,
        sent_s=0.0,
        input_tokens=64,
        emissions=[(0.01 * i, 1) for i in range(64)],
        finish_reason="length",
    )
    samples = [rng.gauss(100, 3) for _ in range(5)]
    return Record(
        run_id=f"run{index}",
        created="2026-01-02T03:04:05Z",
        experiment_name="bench",
        cell=",".join(mix),
        cell_digest=f"{index:064x}",
        baseline=index == 0,
        track="one",
        state="ok",
        parts={role: PartRecord(name=name) for role, name in zip(LEVELS, mix, strict=True)},
        metrics={name: Metric(value=100.0, unit="", samples=samples, ci_low=97.0, ci_high=103.0) for name in METRICS},
        quality={"perplexity[bench]": QualityRecord(value=rng.uniform(14, 20), unit="", better="lower")},
        repeats=[Repeat(wall_s=1.0, requests=[sample] * 8) for _ in range(5)],
        environment={"machine": {"name": "bench", "fingerprint": "f"}, "packages": {"torch": "2.13.0"}},
        complete=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("records"), random.Random(0)
    for index, mix in enumerate(itertools.islice(itertools.product(*LEVELS.values()), NUM_RECORDS)):
        write_record(make_record(index, mix, rng), folder)
    return folder


@pytest.mark.full
def test_leaderboard_of_10000_records(benchmark, folder: Path, tmp_path: Path) -> None:
    def publish() -> list[Path]:
        return leaderboard(scan_records(folder).records, tmp_path)

    assert len(benchmark.pedantic(publish, rounds=1)) == 4


@pytest.mark.full
def test_resume_index_of_10000_records(benchmark, folder: Path) -> None:
    assert len(benchmark.pedantic(complete_cells, (folder,), rounds=1)) == NUM_RECORDS
