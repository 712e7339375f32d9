"""The parent's end of `isolated_worker`: start it, follow it, say its last words when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from infermix.errors import InfermixError, OutOfMemory

WORKER = Path(__file__).with_name("isolated_worker.py")
_LAST_LINES = 6
_MEMORY_WORDS = ("out of memory", "MemoryError", "bad_alloc", "allocate memory")


def run_worker(
    python: Path, script: Path, request: Path, on_event: Callable[[Mapping[str, Any]], None], who: str
) -> None:
    """Run `script` on `request` and hand every event to `on_event`, which may raise to end it.

    Raises `InfermixError` (`OutOfMemory`) with the worker's last lines when it fails. The worker stays in the
    caller's process group and ends with the caller.
    """
    with subprocess.Popen(
        [str(python), "-I", str(WORKER), str(script.resolve()), str(request.resolve())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment(),
        cwd=request.parent,  # some libraries leave logs where they are started
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        last: deque[str] = deque(maxlen=_LAST_LINES)
        reader = threading.Thread(target=_keep_last, args=(process.stderr, last), daemon=True)
        reader.start()
        try:
            for line in process.stdout:
                on_event(json.loads(line))
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            reader.join()
    if code:
        raise _failure(code, list(last), who)


def _environment() -> dict[str, str]:
    """Nothing is fetched: models and data are handed over."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _keep_last(pipe: IO[bytes], last: deque[str]) -> None:
    """Of a progress bar only its last state."""
    for raw in pipe:
        line = raw.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
        if line.strip():
            last.append(line)


def _failure(code: int, last: list[str], who: str) -> InfermixError:
    how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
    text = f"{who} {how}; its last lines: " + " | ".join(last)
    out_of_memory = any(word in line for line in last for word in _MEMORY_WORDS)
    return OutOfMemory(text) if out_of_memory else InfermixError(text)
