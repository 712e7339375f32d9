"""What a decoder launches of its own in a step: on a GPU each operator costs as much as a hundred lines of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoding import requests
from infermix.engine import assembly
from watched_rounds import EAGLE, Recorder

sys.path.insert(0, str(Path(__file__).parent.parent / "bench" / "limits"))

from decoder_overhead import OwnLaunches

Build = Callable[..., Any]
#: Decoder and the most operators in a step of decoding: lists that are copied to the device, rows that are brought to
#: where a replay reads them, columns that are read together.
MOST: list[Any] = [
    (EAGLE, 3),
    (("medusa", {"heads": "medusa", "num_draft_tokens": 12}), 1),
    (("speculative", {"draft": "target", "num_draft_tokens": 3}), 1),
]


@pytest.mark.parametrize(("decoder", "most"), MOST, ids=lambda each: each[0] if isinstance(each, tuple) else "")
def test_operators_of_a_step(build_engine: Build, monkeypatch: pytest.MonkeyPatch, decoder: Any, most: int) -> None:
    monkeypatch.setattr(assembly, "DecoderCapture", lambda build: Recorder())
    engine = build_engine(parts={"decoder": decoder})
    for request in requests({"ignore_eos": True}):
        engine.submit(request)
    engine.step()
    own, seen = OwnLaunches(engine), 0
    while engine.has_work:
        engine.step()
        assert len(own.names) - seen <= most, own.names[seen:]
        seen = len(own.names)
    own.detach()
    assert seen > 0, "nothing was watched"
