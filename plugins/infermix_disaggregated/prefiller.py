"""The decode side's end of the process that computes prompts."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from typing import Any

import msgspec
from infermix.errors import InfermixError, Unsupported
from infermix.roles.request import Request

from infermix_disaggregated.messages import (
    Command,
    Computed,
    Drop,
    Dropped,
    Failed,
    Probe,
    Probed,
    Prompt,
    Ready,
    Reply,
    Spec,
    Way,
)
from infermix_disaggregated.transfer import discard


class Prefiller:
    """Start the worker, send it prompts, read what it computed. Raises `InfermixError` when it fails or dies."""

    def __init__(self, spec: Spec) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "infermix_disaggregated.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ),
        )
        self._replies: queue.Queue[Reply | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._tell(spec)

    def wait_ready(self) -> Ready:
        reply = self._next(None)
        if isinstance(reply, Failed):
            raise Unsupported(f"the prefill worker: {reply.reason}")
        assert isinstance(reply, Ready)
        return reply

    def submit(self, request: Request) -> None:
        self._tell(Prompt(request))

    def computed(self, wait_s: float = 0.0) -> list[Computed]:
        """What is there; waits for the first one at most `wait_s`."""
        found: list[Computed] = []
        while (reply := self._next(0.0 if found else wait_s)) is not None:
            if isinstance(reply, Failed):
                raise InfermixError(f"the prefill worker failed: {reply.reason}")
            assert isinstance(reply, Computed)
            found.append(reply)
        return found

    def drop(self) -> dict[str, float]:
        """Forget all prompts; returns the worker's counters until then."""
        self._tell(Drop())
        while not isinstance(reply := self._next(None), Dropped):
            if isinstance(reply, Failed):
                raise InfermixError(f"the prefill worker failed: {reply.reason}")
            if isinstance(reply, Computed):
                discard(reply)
        return reply.counters

    def probe(self) -> Probed:
        """Before the first prompt."""
        self._tell(Probe())
        reply = self._next(None)
        if isinstance(reply, Failed):
            raise InfermixError(f"the prefill worker failed: {reply.reason}")
        assert isinstance(reply, Probed)
        return reply

    def hand_over(self, *, on_device: bool) -> None:
        self._tell(Way(on_device))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _tell(self, command: Command) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def _next(self, wait_s: float | None) -> Reply | None:
        try:
            reply = self._replies.get(timeout=wait_s) if wait_s != 0.0 else self._replies.get_nowait()
        except queue.Empty:
            return None
        if reply is None:
            self._replies.put(None)
            raise self._death()
        return reply

    def _death(self) -> InfermixError:
        return InfermixError(f"the prefill worker ended with exit code {self._process.wait()}")

    def _read(self) -> None:
        stream: Any = self._process.stdout
        for line in stream:
            self._replies.put(msgspec.json.decode(line, type=Reply))
        self._replies.put(None)
