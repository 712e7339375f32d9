"""What a decoder launches of its own in a step: on a GPU each operator costs as much as a hundred lines of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from infermix.engine import assembly
from infermix.roles.request import Request, SamplingParams
from watched_rounds import EAGLE, Recorder

sys.path.insert(0, str(Path(__file__).parent.parent / "bench" / "limits"))

from decoder_overhead import OwnLaunches

Build = Callable[..., Any]
#: Decoder and operators in a step of decoding: numbers that are copied to the device, rows that are brought to where
#: a replay reads them, columns that are read together.
LAUNCHES: list[Any] = [
    (EAGLE, ["aten.copy_.default", "aten.index_select.out"]),
    (("medusa", {"heads": "medusa", "num_draft_tokens": 12}), ["aten.index_select.out"]),
    (("speculative", {"draft": "target", "num_draft_tokens": 3}), ["aten.cat.default"]),
]


@pytest.mark.parametrize(("decoder", "expected"), LAUNCHES, ids=[each[0][0] for each in LAUNCHES])
def test_operators_of_a_step(
    build_engine: Build, monkeypatch: pytest.MonkeyPatch, decoder: Any, expected: list[str]
) -> None:
    """As long as the same sequences are running, none of them at its end."""
    monkeypatch.setattr(assembly, "DecoderCapture", lambda build: Recorder())
    engine = build_engine(parts={"decoder": decoder})
    for number in range(3):
        sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
        engine.submit(Request(request_id=str(number), prompt_ids=tuple(range(6, 16 + number)), sampling=sampling))
    for _ in range(2):
        engine.step()
    own = OwnLaunches(engine)
    for _ in range(8):
        before = len(own.names)
        engine.step()
        assert own.names[before:] == expected
    own.detach()
