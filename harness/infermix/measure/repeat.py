"""One measured repeat: drive the engine while watching the machine."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

from infermix.measure.clock import Clock
from infermix.measure.drive import drive
from infermix.measure.surroundings import Watch
from infermix.record.record import Repeat
from infermix.roles.engine import Engine
from infermix.roles.request import Request


def measure_repeat(
    engine: Engine,
    requests: Sequence[Request],
    concurrency: int | None,
    *,
    device: str = "cpu",
    clock: Clock | None = None,
    keep_outputs: int = 0,
    own_pids: Iterable[int] | None = None,
) -> Repeat:
    """`drive`, with `Repeat.environment` filled: what `Watch` saw, and how far the engine's `counters` moved.

    Garbage is collected before, so that the repeat does not pay for what came earlier.
    """
    gc.collect()
    before = dict(engine.report().counters)
    watch = Watch(device, own_pids=own_pids, clock=clock)
    repeat = drive(engine, requests, concurrency, clock=clock, keep_outputs=keep_outputs)
    environment = watch.finish()
    after = engine.report().counters
    environment["counters"] = {name: value - before.get(name, 0) for name, value in after.items()}
    repeat.environment = environment
    return repeat
