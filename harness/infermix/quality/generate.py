"""Run requests to their end through `Engine.submit` and `Engine.step`."""

from __future__ import annotations

from collections.abc import Sequence

from infermix.errors import InfermixError
from infermix.roles.engine import Engine
from infermix.roles.request import FinishReason, Request


def generate(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Output tokens of each request, in order. Raises `InfermixError` when one is aborted or fails."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    assert len(outputs) == len(requests), "request ids must differ"
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id].extend(event.token_ids)
            if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise InfermixError(f"request {event.request_id} ended with {event.finish_reason}")
    return [outputs[request.request_id] for request in requests]
