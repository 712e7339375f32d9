"""The child process of one cell: `python -m infermix.child`. Reads commands, answers, dies with its parent."""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from infermix.cell.session import CellSession, measure_machine
from infermix.failure import classify
from infermix.measure.clock import now_ns
from infermix.protocol import (
    Close,
    Command,
    Done,
    Evaluate,
    Failed,
    MeasureCeilings,
    Prepare,
    Profile,
    Progress,
    Reply,
    RunRepeat,
    Setup,
)

_PROGRESS_INTERVAL_NS = 100_000_000


class Channel:
    """Commands in, replies out, on descriptors that no library knows."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._sink = sink
        self._commands: queue.Queue[Command] = queue.Queue()
        self._last_progress_ns = 0
        self._last_phase = ""
        threading.Thread(target=self._read, args=(source,), daemon=True).start()

    def commands(self) -> Iterator[Command]:
        while True:
            yield self._commands.get()

    def send(self, reply: Reply) -> None:
        self._sink.write(msgspec.json.encode(reply) + b"\n")
        self._sink.flush()

    def progress(self, phase: str, fraction: float) -> None:
        """Tell the parent, at most ten times a second within one phase."""
        now = now_ns()
        if phase == self._last_phase and now - self._last_progress_ns < _PROGRESS_INTERVAL_NS:
            return
        self._last_phase, self._last_progress_ns = phase, now
        self.send(Progress(phase=phase, fraction=min(max(fraction, 0.0), 1.0)))

    def _read(self, source: BinaryIO) -> None:
        for line in source:
            self._commands.put(msgspec.json.decode(line, type=Command))
        # The parent is gone: nobody will read a result, and the device must not stay occupied.
        os._exit(3)


def open_channel() -> Channel:
    """Keep the pipes for the protocol; what anything prints goes to stderr, which the parent keeps as the log."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return Channel(source, sink)


class Child:
    """Answers commands; holds the one session of this process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._session: CellSession | None = None

    def answer(self, command: Command) -> Reply:
        """The reply to a command; every exception becomes `Failed`."""
        try:
            return self._dispatch(command)
        except (Exception, SystemExit) as error:  # a cell may raise anything: it is that cell's result
            state, reason = classify(error, loading=isinstance(command, Setup | Prepare))
            return Failed(state=state, reason=reason, traceback=traceback.format_exc())

    def _dispatch(self, command: Command) -> Reply:
        if isinstance(command, MeasureCeilings):
            return measure_machine(command.device, self._channel.progress)
        if isinstance(command, Prepare):
            session = CellSession(_bare_setup(command), self._channel.progress)
            return session.prepare()
        if isinstance(command, Setup):
            self._session = CellSession(command, self._channel.progress)
            return self._session.setup()
        if isinstance(command, Close):
            if self._session is not None:
                self._session.close()
            return Done()
        assert self._session is not None, "no setup was asked for"
        return _continue(self._session, command)


def _bare_setup(command: Prepare) -> Setup:
    return Setup(cell=command.cell, repeats=0, extra_plugins=command.extra_plugins)


def _continue(session: CellSession, command: RunRepeat | Profile | Evaluate) -> Reply:
    if isinstance(command, RunRepeat):
        return session.repeat(command)
    if isinstance(command, Evaluate):
        return session.evaluate()
    return session.profile(command.path)


def main() -> int:
    channel = open_channel()
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    channel.progress("start", 0.0)
    child = Child(channel)
    for command in channel.commands():
        channel.send(child.answer(command))
        if isinstance(command, Close):
            break
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips interpreter teardown: threads and device libraries of an engine may hang or crash in it.
    os._exit(code)
