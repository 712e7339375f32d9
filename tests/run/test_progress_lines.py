"""Progress: time left, plain lines, bars; and the log of a child."""

from __future__ import annotations

import io

from infermix.isolate import Log, child_environment
from infermix.progress import Bars, Lines, Start, Tally, duration
from infermix.record.record import Metric, Record, State
from rich.console import Console


def record(state: State = "ok", reason: str = "") -> Record:
    metrics = {"output_tokens_per_s": Metric(value=12.34, unit="tokens/s")} if state == "ok" else {}
    return Record(
        run_id="r", created="2026-01-01T00:00:00Z", experiment_name="e", cell="a=1", cell_digest="d",
        state=state, reason=reason, metrics=metrics,
    )  # fmt: skip


def test_time_left_comes_from_the_cells_that_ran() -> None:
    now = 0
    tally = Tally(total=4, kept=1, clock_ns=lambda: now)
    assert tally.left_s() is None
    tally.start_cell()
    now = 10_000_000_000
    assert tally.finish_cell() == 10.0
    tally.start_cell()
    now += 4_000_000_000
    assert tally.left_s() == 6.0 + 10.0


def test_durations() -> None:
    assert [duration(value) for value in (None, 0.4, 75, 3723)] == ["-", "0:00", "1:15", "1:02:03"]


def test_lines_name_each_phase_once() -> None:
    lines: list[str] = []
    progress = Lines(lines.append)
    progress.begin(Start(total=2))
    progress.cell("a=1")
    for fraction in (0.0, 0.5, 1.0):
        progress.phase("load", fraction)
    progress.phase("warmup", 0.0)
    progress.done(record())
    progress.cell("a=2")
    progress.done(record("oom", "too big\nand more"))
    assert lines[:4] == ["2 cells, 2 to run", "[1/2] a=1", "  load", "  warmup"]
    assert lines[4].startswith("  ok, 12.3 output tokens/s")
    assert lines[5].startswith("[2/2] a=2, about ")
    assert lines[6].startswith("  oom: too big (")


def test_the_start_line_says_what_is_kept_and_why_cells_run_again() -> None:
    again = {"ended in error": 1, "measured with other versions": 3}
    assert str(Start(total=6, kept=2, again=again)) == (
        "6 cells, 2 kept, 4 to run (1 ended in error, 3 measured with other versions)"
    )
    assert str(Start(total=3, refused=1)) == "3 cells, 1 cannot run, 2 to run"


def test_bars_show_cell_phase_and_outcome() -> None:
    text = io.StringIO()
    bars = Bars(Console(file=text, force_terminal=True, width=100))
    bars.begin(Start(total=2))
    bars.cell("kv=[paged]")
    bars.phase("capture", 0.5)
    bars.done(record())
    bars.end()
    assert "kv=[paged]" in text.getvalue()
    assert "capture" in text.getvalue()
    assert "a=1: ok, 12.3 output tokens/s" in text.getvalue()


def test_the_log_keeps_both_ends() -> None:
    log = Log(head=2, tail=3)
    for number in range(9):
        log.add(f"line {number}\n".encode())
    assert log.lines == ["line 0", "line 1", "... 4 lines left out ...", "line 6", "line 7", "line 8"]


def test_of_a_progress_bar_the_log_keeps_the_last_state() -> None:
    log = Log()
    log.add(b"10%\r50%\r100%\n")
    log.add(b"\xff\xfe\n")
    log.add(b"\n")
    assert log.lines == ["100%", "\ufffd\ufffd"]


def test_threads_are_pinned() -> None:
    environment = child_environment(3)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
