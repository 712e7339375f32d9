"""Records on disk."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import msgspec
import pytest
from infermix.errors import UserError
from infermix.record.record import Metric, Record, Repeat, RequestSample, Summary
from infermix.record.store import (
    complete_cells,
    find_complete,
    read_record,
    record_file_name,
    scan_records,
    write_record,
)


def test_round_trip(make_record, tmp_path: Path) -> None:
    sample = RequestSample(
        request_id="1", arrival_s=0.0, sent_s=0.1, input_tokens=3, emissions=[(0.5, 1)], finish_reason="stop"
    )
    record = make_record(repeats=[Repeat(wall_s=1.0, requests=[sample])], outputs=[{"text": "hé"}], log=["a\nb"])
    path = write_record(record, tmp_path / "deep" / "down")
    assert read_record(path) == record
    assert record.experiment_name in path.name
    assert record.cell_digest[:16] in path.name
    assert record.run_id in path.name


def test_summary_is_the_record_without_samples(make_record, tmp_path: Path) -> None:
    record = make_record(log=["x"])
    summary = read_record(write_record(record, tmp_path), Summary)
    assert not isinstance(summary, Record)
    assert all(getattr(summary, name) == getattr(record, name) for name in Summary.__struct_fields__)


def test_file_has_a_line_per_field(make_record, tmp_path: Path) -> None:
    lines = write_record(make_record(), tmp_path).read_text().splitlines()
    assert len(lines) == len(Record.__struct_fields__) + 2


def test_same_record_same_bytes(make_record, tmp_path: Path) -> None:
    first = write_record(make_record(overrides={"b": 1, "a": 2}), tmp_path / "1").read_bytes()
    assert first == write_record(make_record(overrides={"a": 2, "b": 1}), tmp_path / "2").read_bytes()


@pytest.mark.parametrize("name", ["../../etc/x", "a b/c", ".hidden", "ü" * 300, ""])
def test_file_name_is_safe(make_record, tmp_path: Path, name: str) -> None:
    record = make_record(experiment_name=name)
    file_name = record_file_name(record)
    assert "/" not in file_name
    assert not file_name.startswith(".")
    assert len(file_name.encode()) < 255
    assert write_record(record, tmp_path).parent == tmp_path
    assert len(scan_records(tmp_path).records) == 1


def test_figures_that_are_not_finite_are_left_out(make_record, tmp_path: Path) -> None:
    record = make_record(memory={"peak_bytes": math.inf, "kv_bytes": 1.0})
    record.metrics["broken"] = Metric(value=math.nan, unit="s")
    found = read_record(write_record(record, tmp_path))
    assert "broken" not in found.metrics
    assert found.memory == {"kv_bytes": 1.0}
    assert any("metrics.broken" in line for line in found.log)
    assert "broken" in record.metrics


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_full_disk_leaves_nothing(make_record, tmp_path: Path, monkeypatch, step: str) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if step == "write":
        monkeypatch.setattr(Path, "open", full)
    else:
        monkeypatch.setattr(os, step, full)
    with pytest.raises(UserError, match="No space left on device") as caught:
        write_record(make_record(), tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_write_keeps_the_old_file(make_record, tmp_path: Path, monkeypatch) -> None:
    path = write_record(make_record(reason="old"), tmp_path)

    def stop(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(UserError):
        write_record(make_record(reason="new"), tmp_path)
    assert read_record(path).reason == "old"


def test_folder_that_is_a_file(make_record, tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_record(make_record(), tmp_path / "results")


def altered(record: Record, **changes: object) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(record) | changes)


BAD = {
    "cut short": (lambda r: msgspec.json.encode(r)[:200], "not JSON"),
    "empty": (lambda r: b"", "not JSON"),
    "list": (lambda r: b"[]", "not a record"),
    "other json": (lambda r: b'{"a": 1}', "schema_version"),
    "newer": (lambda r: altered(r, schema_version=99), "schema version 99 is newer than 1.*upgrade"),
    "zero": (lambda r: altered(r, schema_version=0), "does not exist"),
    "wrong type": (lambda r: altered(r, metrics={"x": {"value": "fast", "unit": "s"}}), r"\$.metrics\[...\].value"),
    "wrong state": (lambda r: altered(r, state="fine"), r"\$.state"),
    "missing field": (lambda r: b'{"schema_version": 1}', "run_id"),
    "not utf-8": (lambda r: b'{"schema_version": 1, "run_id": "\xff"}', "not JSON|not a valid record|not a record"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(make_record, tmp_path: Path, case: str) -> None:
    make, message = BAD[case]
    bad = tmp_path / "bad.json"
    bad.write_bytes(make(make_record()))
    with pytest.raises(UserError, match=message) as caught:
        read_record(bad)
    assert "bad.json" in str(caught.value)
    good = write_record(make_record(), tmp_path)
    scan = scan_records(tmp_path)
    assert scan.paths == [good]
    assert len(scan.warnings) == 1
    assert "bad.json" in scan.warnings[0]
    assert "\n" not in scan.warnings[0]


def test_newer_schema_may_have_other_types(make_record, tmp_path: Path) -> None:
    (tmp_path / "new.json").write_bytes(b'{"schema_version": 2, "metrics": 7}')
    assert "newer" in scan_records(tmp_path).warnings[0]


def test_unknown_fields_of_the_same_schema_are_ignored(make_record, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(altered(make_record(), later_addition={"x": 1}))
    assert read_record(tmp_path / "r.json") == make_record()


def test_scan_leaves_other_files_alone(make_record, tmp_path: Path) -> None:
    write_record(make_record(), tmp_path / "a" / "b")
    (tmp_path / ".x.json.12.tmp").write_text("half")
    (tmp_path / ".hidden.json").write_text("{")
    (tmp_path / "leaderboard.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("x")
    scan = scan_records(tmp_path)
    assert len(scan.records) == 1
    assert scan.warnings == []


def test_scan_of_nothing(tmp_path: Path) -> None:
    assert scan_records(tmp_path).records == []
    with pytest.raises(UserError, match="no such file or directory"):
        scan_records(tmp_path / "nowhere")


def test_missing_record(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json: cannot be read"):
        read_record(tmp_path / "nowhere.json")


def test_index_of_complete_cells(make_record, tmp_path: Path) -> None:
    old = make_record(run_id="old", created="2026-01-01T00:00:00Z")
    new = make_record(run_id="new", created="2026-01-02T00:00:00Z")
    unfinished = make_record(run_id="later", created="2026-01-03T00:00:00Z", complete=False)
    other = make_record(parts={"kv": "dense"}, complete=False)
    for record in (new, old, unfinished, other):
        write_record(record, tmp_path)
    (tmp_path / "bad.json").write_text("{")
    assert complete_cells(tmp_path) == {new.cell_digest: tmp_path / record_file_name(new)}
    assert find_complete(tmp_path, other.cell_digest) is None
    assert find_complete(tmp_path / "nowhere", "x") is None
