"""One measured repeat: drive the engine, watch the machine, compare what came back with what was asked."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from infermix.measure.clock import Clock
from infermix.measure.drive import drive
from infermix.measure.goodput import failed, output_tokens
from infermix.measure.surroundings import Watch
from infermix.record.record import Repeat, RequestSample
from infermix.roles.engine import Engine
from infermix.roles.request import Request


def measure_repeat(
    engine: Engine,
    requests: Sequence[Request],
    concurrency: int | None,
    *,
    device: str = "cpu",
    input_tokens: tuple[int, int] | None = None,
    clock: Clock | None = None,
    keep_outputs: int = 0,
    own_pids: Iterable[int] | None = None,
) -> Repeat:
    """`drive`, with everything that the guards need in `Repeat.environment`.

    That is what `Watch` saw; `counters`, how far the engine's moved; `inputs_off` and `outputs_off`, how many lengths
    differ from what was asked; `shareable_tokens`, what a prefix cache may serve. `input_tokens` is the range of
    prompt lengths that the workload promises. Garbage is collected before, so that the repeat does not pay for what
    came earlier.
    """
    gc.collect()
    before = dict(engine.report().counters)
    watch = Watch(device, own_pids=own_pids, clock=clock)
    repeat = drive(engine, requests, concurrency, clock=clock, keep_outputs=keep_outputs)
    repeat.environment = {
        **watch.finish(),
        "counters": _moved(before, engine.report().counters),
        **compare_lengths(repeat.requests, requests, input_tokens),
        "shareable_tokens": shareable_tokens(requests),
    }
    log = getattr(engine, "step_log", None)
    if log is not None and (rows := log()) is not None:
        repeat.environment["step_log"] = list(rows)
    return repeat


def simulate_repeat(engine: Any, requests: Sequence[Request], concurrency: int | None) -> Repeat:
    """`drive` on the virtual clock of an engine that has one; nothing of the machine is looked at."""
    before = dict(engine.report().counters)
    gc.collect()
    gc.disable()  # nothing of a simulation is a cycle, and a million requests take long to look through
    try:
        repeat = drive(engine, requests, concurrency, clock=engine.clock)
    finally:
        gc.enable()
    repeat.environment = {"counters": _moved(before, engine.report().counters)}
    if repeat.environment["counters"].get("prefix_hit_tokens"):
        repeat.environment["shareable_tokens"] = shareable_tokens(requests)
    if any(len(sample.emissions) < output_tokens(sample) for sample in repeat.requests):
        repeat.gaps = engine.gaps()
    return repeat


def _moved(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def compare_lengths(
    samples: Sequence[RequestSample], requests: Sequence[Request], input_tokens: tuple[int, int] | None = None
) -> dict[str, int]:
    """Prompts outside the promised range or sent with another length; outputs of another length than asked."""
    asked = {request.request_id: request for request in requests}
    low, high = input_tokens or (1, 2**62)
    inputs = outputs = 0
    for sample in samples:
        request = asked[sample.request_id]
        inputs += sample.input_tokens != len(request.prompt_ids) or not low <= sample.input_tokens <= high
        if not failed(sample):
            lengths = [sum(tokens for _, tokens in output.emissions) for output in sample.outputs]
            outputs += sum(not _output_as_asked(length, request) for length in lengths)
    return {"inputs_off": inputs, "outputs_off": outputs}


def _output_as_asked(tokens: int, request: Request) -> bool:
    """Exactly the asked number where nothing may end a request early, otherwise at most that."""
    sampling = request.sampling
    if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
        return tokens == sampling.max_new_tokens
    return tokens <= sampling.max_new_tokens


def shareable_tokens(requests: Sequence[Request]) -> int:
    """Most prompt tokens that a prefix cache could serve within one repeat."""
    prompts = sorted(request.prompt_ids for request in requests)
    return sum(_common_prefix(earlier, later) for earlier, later in pairwise(prompts))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
