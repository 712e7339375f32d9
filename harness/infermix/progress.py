"""How a sweep shows where it is: bars on a terminal, lines elsewhere, nothing for the Python API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from infermix.measure.clock import now_ns

if TYPE_CHECKING:
    from rich.console import Console

    from infermix.record.record import Summary


@dataclass(frozen=True, kw_only=True)
class Start:
    """How many cells a sweep has, how many `kept` their record and how many cannot run (`refused`).

    `again` counts the cells that run although they have a record, by the reason.
    """

    total: int
    kept: int = 0
    refused: int = 0
    again: Mapping[str, int] = field(default_factory=dict)

    @property
    def to_run(self) -> int:
        return self.total - self.kept - self.refused

    def __str__(self) -> str:
        parts = [f"{self.total} cells"]
        parts += [f"{self.kept} kept"] if self.kept else []
        parts += [f"{self.refused} cannot run"] if self.refused else []
        why = ", ".join(f"{count} {reason}" for reason, count in self.again.items())
        return ", ".join([*parts, f"{self.to_run} to run"]) + (f" ({why})" if why else "")


class SweepProgress(Protocol):
    """What a sweep tells while it runs. `end` is called whatever happens."""

    def begin(self, start: Start) -> None: ...

    def cell(self, name: str) -> None: ...

    def phase(self, name: str, fraction: float) -> None: ...

    def done(self, record: Summary) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class Silent:
    """Shows nothing."""

    def begin(self, start: Start) -> None: ...

    def cell(self, name: str) -> None: ...

    def phase(self, name: str, fraction: float) -> None: ...

    def done(self, record: Summary) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class Tally:
    """Cells done and time left, judged by the cells that were run so far."""

    def __init__(self, total: int, kept: int, clock_ns: Callable[[], int] = now_ns) -> None:
        self.total, self.finished = total, kept
        self._clock_ns = clock_ns
        self._seconds: list[float] = []
        self._started_ns = clock_ns()

    def start_cell(self) -> None:
        self._started_ns = self._clock_ns()

    def finish_cell(self) -> float:
        """Seconds that the cell took."""
        self._seconds.append((self._clock_ns() - self._started_ns) / 1e9)
        self.finished += 1
        return self._seconds[-1]

    def left_s(self) -> float | None:
        """`None` until one cell was run."""
        if not self._seconds:
            return None
        running = (self._clock_ns() - self._started_ns) / 1e9
        mean = fmean(self._seconds)
        return max(0.0, mean - running) + mean * max(0, self.total - self.finished - 1)


def duration(seconds: float | None) -> str:
    """`1:02:03`, `2:03`; `-` when unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def outcome(record: Summary) -> str:
    """One line on how a cell ended."""
    rate = record.metrics.get("output_tokens_per_s")
    if record.state == "ok":
        return f"ok, {rate.value:.1f} output tokens/s" if rate else "ok"
    return f"{record.state}: {record.reason.splitlines()[0] if record.reason else 'no reason given'}"


class Lines:
    """One plain line per event, for logs and pipes; a phase is named once per cell."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._tally = Tally(0, 0)
        self._phase = ""

    def begin(self, start: Start) -> None:
        self._tally = Tally(start.total, start.total - start.to_run)
        self._write(str(start))

    def cell(self, name: str) -> None:
        self._tally.start_cell()
        self._phase = ""
        left = self._tally.left_s()
        eta = "" if left is None else f", about {duration(left)} left"
        self._write(f"[{self._tally.finished + 1}/{self._tally.total}] {name}{eta}")

    def phase(self, name: str, fraction: float) -> None:
        if name != self._phase:
            self._phase = name
            self._write(f"  {name}")

    def done(self, record: Summary) -> None:
        seconds = self._tally.finish_cell()
        self._write(f"  {outcome(record)} ({duration(seconds)})")

    def note(self, text: str) -> None:
        self._write(text)

    def end(self) -> None: ...


class Bars:
    """Two rich bars: cells, and the current phase of the current cell."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tally = Tally(0, 0)
        self._phase = ""
        self._cells = self._bars.add_task("cells", total=None, state="")
        self._current = self._bars.add_task("", total=1.0, state="", visible=False)

    def begin(self, start: Start) -> None:
        self._tally = Tally(start.total, start.total - start.to_run)
        self.note(str(start))
        self._bars.update(self._cells, total=start.total)
        self._bars.start()
        self._show_cells()

    def cell(self, name: str) -> None:
        self._tally.start_cell()
        self._bars.reset(self._current, description=name, state="start", visible=True)
        self._show_cells()

    def phase(self, name: str, fraction: float) -> None:
        self._show_cells()
        self._bars.update(self._current, completed=fraction, state=name, refresh=name != self._phase)
        self._phase = name

    def done(self, record: Summary) -> None:
        seconds = self._tally.finish_cell()
        self.note(f"{record.cell}: {outcome(record)} ({duration(seconds)})")
        self._bars.update(self._current, visible=False)
        self._show_cells()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def end(self) -> None:
        self._bars.stop()

    def _show_cells(self) -> None:
        tally = self._tally
        state = f"{tally.finished} of {tally.total}, about {duration(tally.left_s())} left"
        self._bars.update(self._cells, completed=tally.finished, state=state)
