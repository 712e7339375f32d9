"""The process that computes prompts: `python -m infermix_disaggregated.worker`. Dies with its parent."""

from __future__ import annotations

import os
import queue
import sys
import threading
from dataclasses import replace
from typing import Any, BinaryIO

import msgspec
from infermix.measure.clock import now_ns
from infermix.roles.request import FinishReason, Request, Sequence, TokenEvent

from infermix_disaggregated.messages import (
    Command,
    Computed,
    Drop,
    Dropped,
    Failed,
    Probe,
    Prompt,
    Ready,
    Reply,
    Spec,
    Way,
    context_of,
)
from infermix_disaggregated.probe import probed
from infermix_disaggregated.transfer import check_layout, send


class Worker:
    """A native engine that is asked for one token per request, and hands its KV over before it lets go of it."""

    def __init__(self, spec: Spec) -> None:
        from infermix.engine.assembly import assemble

        from infermix_disaggregated.plugin import DisaggregatedOptions

        context = context_of(spec, now_ns)
        engine: Any = assemble(msgspec.convert(spec.options, DisaggregatedOptions), context)
        self.engine = engine
        self._layout = next(part.name for part in spec.parts if part.role == "kv")
        self._sent: dict[str, Computed] = {}
        self._asked: dict[str, Request] = {}
        self.on_device = False
        check_layout(self.engine.store, self.engine.shape)
        self.engine.before_release = self._export

    @property
    def ready(self) -> Ready:
        report = self.engine.report()
        return Ready(dict(report.setup_s), report.weight_bytes, report.kv_bytes)

    def submit(self, request: Request) -> None:
        self._asked[request.request_id] = request
        sampling = replace(request.sampling, max_new_tokens=1, min_new_tokens=min(1, request.sampling.min_new_tokens))
        self.engine.submit(replace(request, sampling=sampling))

    def step(self) -> list[Computed]:
        replies = [self._reply(event) for event in self.engine.step()]
        if replies:
            replies[-1].counters = dict(self.engine.report().counters)
        return replies

    def _export(self, sequence: Sequence, reason: FinishReason) -> None:
        request = self._asked[sequence.request.request_id]
        if reason is FinishReason.STOP or request.sampling.max_new_tokens == 1:
            return
        begin, engine = now_ns(), self.engine
        parcel = send(
            engine.store, engine.space, engine.shape, self._layout, sequence.seq_id, sequence.num_prompt_tokens,
            on_device=self.on_device,
        )  # fmt: skip
        self._sent[request.request_id] = Computed(
            request_id=request.request_id, token=-1, stopped=False, parcel=parcel, export_s=(now_ns() - begin) / 1e9
        )

    def _reply(self, event: TokenEvent) -> Computed:
        del self._asked[event.request_id]
        stopped = event.finish_reason is FinishReason.STOP
        found = self._sent.pop(event.request_id, None)
        if found is None:
            return Computed(request_id=event.request_id, token=event.token_ids[0], stopped=stopped)
        found.token = event.token_ids[0]
        return found

    def drop(self) -> Dropped:
        counters = dict(self.engine.report().counters)
        self.engine.reset()
        self._asked.clear()
        return Dropped(counters)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer commands until the other side is gone."""
    commands: queue.Queue[Command] = queue.Queue()
    threading.Thread(target=_read, args=(source, commands), daemon=True).start()

    def tell(reply: Reply) -> None:
        sink.write(msgspec.json.encode(reply) + b"\n")
        sink.flush()

    worker: Worker | None = None
    try:
        while True:
            while worker is None or not worker.engine.has_work or not commands.empty():
                command = commands.get()
                if isinstance(command, Spec):
                    worker = Worker(command)
                    tell(worker.ready)
                else:
                    assert worker is not None
                    for reply in _obey(worker, command):
                        tell(reply)
            for reply in worker.step():
                tell(reply)
    except Exception as error:
        tell(Failed(f"{type(error).__name__}: {error}"))


def _obey(worker: Worker, command: Command) -> list[Reply]:
    if isinstance(command, Drop):
        return [worker.drop()]
    if isinstance(command, Probe):
        return [probed(str(worker.engine.model.device))]
    if isinstance(command, Way):
        worker.on_device = command.on_device
        return []
    assert isinstance(command, Prompt)
    worker.submit(command.request)
    return []


def _read(source: BinaryIO, commands: queue.Queue[Command]) -> None:
    for line in source:
        commands.put(msgspec.json.decode(line, type=Command))
    os._exit(3)  # the parent is gone


def main() -> None:
    """What anything prints goes to stderr; the pipes belong to the messages."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(source, sink)
    sys.stderr.flush()


if __name__ == "__main__":
    main()
