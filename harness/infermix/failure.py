"""From an exception, an exit code or the last words of a process to the state and the reason of a row."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from infermix.errors import InfermixError, OutOfMemory, Unsupported, WrongResult
from infermix.record.record import State

_MEMORY_TEXT = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|can(no|')t allocate memory|bad_alloc|ALLOC_FAILED", re.IGNORECASE
)
_LAST_LINES = 3


class CellFailure(InfermixError):
    """A cell that ended early: the state of its row and why. `details` go to the record's log."""

    def __init__(self, state: State, reason: str, details: str = "") -> None:
        self.state, self.reason, self.details = state, reason, details
        super().__init__(reason)


def classify(error: BaseException, *, loading: bool) -> tuple[State, str]:
    """State and reason for an exception inside the child; while `loading`, `Unsupported` means "does not mix"."""
    text = str(error).strip() or "no message"
    named = text if isinstance(error, InfermixError) else f"{type(error).__name__}: {text}"
    if _is_memory_error(error):
        return "oom", named
    if isinstance(error, WrongResult):
        return "wrong", named
    if loading and isinstance(error, Unsupported):
        return "invalid", named
    return "error", named


def _is_memory_error(error: BaseException) -> bool:
    if isinstance(error, MemoryError | OutOfMemory):
        return True
    # torch's class is recognised by name, so that no torch is imported for an engine that needs none.
    if any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_MEMORY_TEXT.search(str(error)))


def from_exit(returncode: int, log: Sequence[str], *, kernel_killed: bool) -> CellFailure:
    """A child that ended without an answer. `kernel_killed`: the kernel's out-of-memory killer struck meanwhile."""
    last = " | ".join(line for line in log[-_LAST_LINES:])
    tail = f"; last output: {last}" if last else ""
    if returncode == -signal.SIGKILL and kernel_killed:
        return CellFailure("oom", f"killed by the kernel: the host ran out of memory{tail}")
    if returncode < 0:
        how = f"ended by signal {signal.Signals(-returncode).name}"
    else:
        how = f"ended with exit code {returncode} before it answered"
    state: State = "oom" if any(_MEMORY_TEXT.search(line) for line in log[-_LAST_LINES:]) else "error"
    return CellFailure(state, f"the process of the cell {how}{tail}")


def kernel_oom_kills() -> int | None:
    """How often the kernel has killed for memory since boot; `None` where the system does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
