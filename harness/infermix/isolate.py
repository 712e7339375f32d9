"""The parent's end of a child process: start it, ask it, watch its time, read its last words, end its group."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Self, TypeVar

import msgspec

from infermix.failure import CellFailure, from_exit, kernel_oom_kills
from infermix.measure.clock import now_ns
from infermix.measure.surroundings import usable_cores
from infermix.protocol import Close, Command, Done, Failed, Progress, Reply

_POLL_S = 0.2
_CLOSE_LIMIT_S = 30.0
_END_LIMIT_S = 20.0
_STACK_DUMP_S = 0.3
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

Answer = TypeVar("Answer")


def ignore_progress(progress: Progress) -> None:
    """The listener of a caller that shows nothing."""


class Log:
    """What a child wrote to stdout and stderr: the first and the last lines."""

    def __init__(self, head: int = 100, tail: int = 300) -> None:
        self._head: list[str] = []
        self._tail: deque[str] = deque(maxlen=tail)
        self._head_limit = head
        self._dropped = 0

    def add(self, raw: bytes) -> None:
        """One line; of a progress bar only its last state."""
        line = raw.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
        if not line.strip():
            return
        if len(self._head) < self._head_limit:
            self._head.append(line)
            return
        self._dropped += len(self._tail) == self._tail.maxlen
        self._tail.append(line)

    @property
    def lines(self) -> list[str]:
        gap = [f"... {self._dropped} lines left out ..."] if self._dropped else []
        return [*self._head, *gap, *self._tail]


def child_environment(num_threads: int | None) -> dict[str, str]:
    """The caller's environment with pinned CPU threads (`None`: every core that this process may use).

    Waiting threads spin briefly and then sleep, unless the caller says otherwise. With libgomp's own default a small
    product of two threads took 21 ms instead of 0.7 ms on a machine with other load; sleeping at once cost a quiet
    machine a third (0.26 against 0.18 ms). 20,000 turns come within a tenth of the best in both.
    """
    threads = str(num_threads or usable_cores())
    pinned = dict.fromkeys(_THREAD_VARIABLES, threads)
    fixed = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {"GOMP_SPINCOUNT": "20000", **os.environ, **pinned, **fixed}


class Child:
    """One process of `infermix.child`, in a process group of its own.

    `time_limit_s` is spent only while a question is open, so two children that are driven in turn do not pay for each
    other. Every failure arrives as `CellFailure`; afterwards only `end` may be called. `python` is the interpreter
    of the environment that the cell's engine asks for; `limit` says in a time-out what set it.
    """

    def __init__(
        self,
        *,
        time_limit_s: float,
        num_threads: int | None = None,
        python: str = sys.executable,
        limit: str = "measure.time_limit_s",
    ) -> None:
        self.log = Log()
        self.start_s: float | None = None
        self._limit_s = self._left_s = time_limit_s
        self._limit = limit
        self._phase = "start"
        self._oom_kills = kernel_oom_kills()
        self._started_ns = now_ns()
        self._process = _spawn(python, child_environment(num_threads))
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        _start_reader(self._process.stdout, self._lines.put, end=lambda: self._lines.put(None))
        self._log_reader = _start_reader(self._process.stderr, self.log.add)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self,
        command: Command,
        answer: type[Answer],
        on_progress: Callable[[Progress], None] = ignore_progress,
    ) -> Answer:
        """Send a command and wait for its answer. Raises `CellFailure`."""
        self._send(command)
        while True:
            reply = self._receive()
            if isinstance(reply, Progress):
                self._phase = reply.phase
                on_progress(reply)
            elif isinstance(reply, Failed):
                raise CellFailure(reply.state, reply.reason, reply.traceback)
            elif isinstance(reply, answer):
                return reply
            else:
                raise CellFailure("error", f"the child answered {type(reply).__name__} to {command!r}")

    def close(self) -> None:
        """Let the child release its engine, then end it. Never raises: what was measured is already here."""
        self._left_s = min(self._left_s, _CLOSE_LIMIT_S)
        try:
            self.ask(Close(), Done)
            self._process.wait(_CLOSE_LIMIT_S)
        except (CellFailure, subprocess.TimeoutExpired) as failure:
            self.log.add(f"closing failed: {failure}".encode())
        self.end()

    def end(self) -> None:
        """Kill the whole process group, whatever it does, and collect what it wrote."""
        self._signal_group(signal.SIGKILL)
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.log.add(b"the process does not end: it hangs inside the kernel or a driver")
        self._log_reader.join(1.0)
        assert self._process.stdin is not None
        _close_quietly(self._process.stdin)

    def _send(self, command: Command) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def _receive(self) -> Reply:
        while True:
            line = self._next_line()
            try:
                reply = msgspec.json.decode(line, type=Reply)
            except (msgspec.DecodeError, msgspec.ValidationError):
                self.log.add(line)  # something printed before the child had moved its stdout aside
                continue
            if self.start_s is None:
                self.start_s = (now_ns() - self._started_ns) / 1e9
            return reply

    def _next_line(self) -> bytes:
        asked_ns = now_ns()
        try:
            while True:
                waited_s = (now_ns() - asked_ns) / 1e9
                if waited_s >= self._left_s:
                    raise self._time_out()
                line = self._poll_line(min(_POLL_S, self._left_s - waited_s))
                if line is not None:
                    return line
        finally:
            self._left_s -= (now_ns() - asked_ns) / 1e9

    def _poll_line(self, timeout_s: float) -> bytes | None:
        """A line, `None` when there is none yet. Raises `CellFailure` when there will be none."""
        ended = self._process.poll() is not None
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            # A forked grandchild may hold the pipe open: then no end of file comes, only the exit status.
            if ended:
                raise self._death() from None
            return None
        if line is None:
            raise self._death()
        return line

    def _time_out(self) -> CellFailure:
        self._signal_group(signal.SIGUSR1)  # the child writes its stacks to the log
        self._log_reader.join(_STACK_DUMP_S)
        self.end()
        return CellFailure("timeout", f"longer than {self._limit_s:g} s in all ({self._limit}), during {self._phase}")

    def _death(self) -> CellFailure:
        try:
            returncode = self._process.wait(_CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            returncode = None
        self.end()
        if returncode is None:
            return CellFailure("error", "the child closed its pipe and did not exit")
        kills = kernel_oom_kills()
        struck = kills is not None and self._oom_kills is not None and kills > self._oom_kills
        return from_exit(returncode, self.log.lines, kernel_killed=struck)

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return


def _spawn(python: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [python, "-m", "infermix.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=dict(environment),
    )


def _start_reader(
    pipe: IO[bytes], take: Callable[[bytes], None], end: Callable[[], None] = lambda: None
) -> threading.Thread:
    def read() -> None:
        with pipe:
            for line in pipe:
                take(line)
        end()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _close_quietly(pipe: IO[bytes]) -> None:
    """Close a pipe whose reader is gone: what is left in its buffer has no destination."""
    try:
        pipe.close()
    except BrokenPipeError:
        return
