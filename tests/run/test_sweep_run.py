"""Order, resuming, selection and interruption of a sweep."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import infermix
import pytest
from infermix.errors import UserError
from infermix.progress import Start
from infermix.record.environment import package_versions
from infermix.record.record import Record, Summary
from infermix.record.store import scan_records
from infermix.resume import same_versions
from infermix.roles.component import Choice, Component, Provenance, Registered, Role

Write = Callable[..., Path]

SWEEP = {"sweep": {"workload.max_new_tokens": [4, 6, 8]}, "baseline": {"workload.max_new_tokens": 6}}


class Recorder:
    """A progress listener that keeps what it hears."""

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.phases: list[str] = []
        self.notes: list[str] = []
        self.totals: tuple[int, int] | None = None
        self.again: dict[str, int] = {}
        self.ended = False

    def begin(self, start: Start) -> None:
        self.totals = (start.total, start.kept)
        self.again = dict(start.again)

    def cell(self, name: str) -> None:
        self.cells.append(name)

    def phase(self, name: str, fraction: float) -> None:
        self.phases.append(name)

    def done(self, record: Summary) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def sweep(plugin: str, tmp_path: Path) -> Callable[..., tuple[list[Record], Recorder]]:
    def go(path: Path, **options: Any) -> tuple[list[Record], Recorder]:
        heard = Recorder()
        records = infermix.run(
            path,
            out=tmp_path / "out",
            ceilings=False,
            extra_plugins=[plugin],
            progress=heard,
            **options,
        )
        return records, heard

    return go


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "out").rglob("*.json"))


def test_the_baseline_runs_first_and_records_come_in_cell_order(experiment: Write, sweep: Any) -> None:
    records, heard = sweep(experiment(**SWEEP))
    assert [len(record.repeats[0].requests[0].emissions) for record in records] == [4, 6, 8]
    assert [record.baseline for record in records] == [False, True, False]
    assert heard.cells[0] == records[1].cell
    assert heard.totals == (3, 0)
    assert heard.ended
    assert "warmup" in heard.phases
    assert "repeat 2 of 2" in heard.phases


def test_a_second_run_keeps_what_is_there(experiment: Write, sweep: Any, tmp_path: Path) -> None:
    first, _ = sweep(experiment(**SWEEP))
    before = files(tmp_path)
    second, heard = sweep(experiment(**SWEEP))
    assert heard.cells == []
    assert heard.totals == (3, 3)
    assert [record.run_id for record in second] == [record.run_id for record in first]
    assert files(tmp_path) == before


def test_fresh_runs_again_and_keeps_the_old_records(experiment: Write, sweep: Any, tmp_path: Path) -> None:
    first, _ = sweep(experiment())
    second, heard = sweep(experiment(), fresh=True)
    assert len(heard.cells) == 1
    assert first[0].run_id != second[0].run_id
    assert len(files(tmp_path)) == 2


def test_only_the_changed_cells_run_again(experiment: Write, sweep: Any) -> None:
    sweep(experiment(**SWEEP))
    _, heard = sweep(experiment(sweep={"workload.max_new_tokens": [4, 5]}))
    assert len(heard.cells) == 1


def test_only_picks_cells_by_name(experiment: Write, sweep: Any) -> None:
    records, _ = sweep(experiment(**SWEEP), only="*8")
    assert [record.overrides for record in records] == [{"workload.max_new_tokens": 8}]
    with pytest.raises(UserError, match="no cell matches"):
        sweep(experiment(**SWEEP), only="nothing*")


def test_set_overrides_one_value(experiment: Write, sweep: Any) -> None:
    ((record,), _) = sweep(experiment(), sets=["measure.repeats=1"])
    assert len(record.repeats) == 1


def test_incomplete_and_broken_records_do_not_count(experiment: Write, sweep: Any, tmp_path: Path) -> None:
    sweep(experiment())
    (path,) = files(tmp_path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "complete": False}))
    _, heard = sweep(experiment())
    assert len(heard.cells) == 1
    path.write_text('{"schema_version": 1, "run_id": ')
    _, heard = sweep(experiment())
    assert heard.cells == []
    assert any(path.name in note for note in heard.notes)


def test_a_record_of_another_machine_does_not_count(experiment: Write, sweep: Any, tmp_path: Path) -> None:
    sweep(experiment())
    (path,) = files(tmp_path)
    data = json.loads(path.read_text())
    data["environment"]["machine"]["fingerprint"] = "elsewhere"
    path.write_text(json.dumps(data))
    _, heard = sweep(experiment())
    assert len(heard.cells) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state": "error"}, "ended in error"),
        ({"state": "oom"}, "ended in oom"),
        ({"state": "timeout"}, "ended in timeout"),
        ({"state": "wrong"}, "gave wrong results"),
        ({"state": "invalid", "reason": "no"}, "refused for other reasons"),
        ({"packages": {"torch": "0.1"}}, "measured with other versions"),
        ({"packages": {"infermix": "0.0"}}, "measured with other versions"),
    ],
)
def test_what_is_no_result_to_keep_runs_again(
    experiment: Write, sweep: Any, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    sweep(experiment())
    (path,) = files(tmp_path)
    data = json.loads(path.read_text())
    data["environment"]["packages"] |= change.pop("packages", {})
    path.write_text(json.dumps(data | change))
    records, heard = sweep(experiment())
    assert heard.again == {why: 1}
    assert [record.state for record in records] == ["ok"]
    _, heard = sweep(experiment())
    assert (heard.totals, heard.cells) == ((1, 1), [])


def test_another_version_of_a_part_runs_its_cells_again() -> None:
    packages = package_versions()
    engine = Registered(Component(name="e", role=Role.ENGINE, summary="", build=print), Provenance("mine", "2", "m"))
    choices = [Choice(engine, None)]
    assert same_versions({**packages, "mine": "2"}, choices, packages)
    assert not same_versions({**packages, "mine": "1"}, choices, packages)


def test_another_version_of_a_library_runs_the_cells_that_need_it_again() -> None:
    packages = package_versions()
    component = Component(name="e", role=Role.ENGINE, summary="", build=print, requires=("pytest",))
    choices = [Choice(Registered(component, Provenance("mine", "2", "m")), None)]
    recorded = {**packages, "mine": "2", **package_versions(["pytest"])}
    assert same_versions(recorded, choices, packages)
    assert not same_versions({**recorded, "pytest": "0.1"}, choices, packages)


def test_refused_cells_get_their_record_at_once(experiment: Write, sweep: Any, tmp_path: Path) -> None:
    path = experiment(parts={"attention": "sdpa"}, sweep={"workload.max_new_tokens": [4, 5]})
    records, heard = sweep(path)
    assert [record.state for record in records] == ["invalid", "invalid"]
    assert all("attention" in record.reason for record in records)
    assert all(record.complete for record in records)
    assert heard.cells == []
    sweep(path)
    assert len(files(tmp_path)) == 2


def test_a_sweep_goes_on_after_a_crash(experiment: Write, sweep: Any) -> None:
    records, _ = sweep(experiment(sweep={"engine.fault": ["crash", "none", "memory"]}))
    assert [record.state for record in records] == ["error", "ok", "oom"]


def test_a_full_disk_stops_the_sweep_and_says_what_is_kept(
    experiment: Write, sweep: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from infermix.record import store

    written: list[Path] = []
    really_write = store._write_and_sync

    def write(path: Path, data: bytes) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        really_write(path, data)

    monkeypatch.setattr(store, "_write_and_sync", write)
    with pytest.raises(UserError, match=r"No space left on device; 1 records of this run are kept in .*out"):
        sweep(experiment(**SWEEP))
    assert len(scan_records(tmp_path / "out", Record).records) == 1
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_an_unwritable_folder_is_refused_before_anything_runs(experiment: Write, sweep: Any, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file, not a folder")
    with pytest.raises(UserError, match="cannot be created"):
        sweep(experiment())


SCRIPT = """
import functools, sys
from argparse import Namespace
from pathlib import Path
import infermix.api
from infermix.commands import run
infermix.api.run = functools.partial(infermix.api.run, extra_plugins=[sys.argv[3]])
sys.exit(run.execute(Namespace(file=Path(sys.argv[1]), out=Path(sys.argv[2]), sets=[], only=None, fresh=False,
                               ray=None, profile=False, no_ceilings=True)))
"""


def command(path: Path, out: Path, plugin: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT, str(path), str(out), plugin]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_keeps_finished_cells_and_ends_the_child(
    experiment: Write, sweep: Any, plugin: str, tmp_path: Path, number: int
) -> None:
    path = experiment(sweep={"engine.fault": ["none", "hang"]})
    process = subprocess.Popen(
        command(path, tmp_path / "out", plugin), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        # A suite that runs in the background inherits an ignored SIGINT, and would hand it on.
        preexec_fn=functools.partial(signal.signal, number, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[2/2]"):
            break
    time.sleep(1.0)
    started = children(process.pid)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "finished cells are kept" in errors
    assert started
    assert not [pid for pid in started if running(pid)]
    (record,) = scan_records(tmp_path / "out", Record).records
    assert record.state == "ok"
    assert not list((tmp_path / "out").glob(".*"))
    again, heard = sweep(path, only="*none*")
    assert heard.cells == []
    assert again[0].run_id == record.run_id


def test_the_command_prints_a_table_and_writes_the_leaderboard(
    experiment: Write, plugin: str, tmp_path: Path
) -> None:
    path = experiment(sweep={"engine.fault": ["none", "memory"]})
    done = subprocess.run(command(path, tmp_path / "out", plugin), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "oom" in done.stdout
    assert (tmp_path / "out" / "LEADERBOARD.md").is_file()
    assert "[1/2]" in done.stderr
    assert "2 cells, 2 to run" in done.stderr


def test_the_command_fails_when_a_cell_ends_in_error(experiment: Write, plugin: str, tmp_path: Path) -> None:
    path = experiment(sweep={"engine.fault": ["none", "raise"]})
    done = subprocess.run(command(path, tmp_path / "out", plugin), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
