"""The native engine's log of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from infermix.engine.components import NativeOptions
from infermix.measure.repeat import measure_repeat
from infermix.roles.request import Request, SamplingParams


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_every_step_is_logged(build_engine: Callable[..., Any], overlap: str) -> None:
    engine = build_engine(engine={"step_log": True, "overlap": overlap})
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    asked = [Request(request_id=str(n), prompt_ids=(7 + n,) * (3 + n), sampling=sampling) for n in range(5)]
    repeat = measure_repeat(engine, asked, 2)
    rows, counters = repeat.environment["step_log"], repeat.environment["counters"]
    assert len(rows) == counters["graph_steps"] + counters["eager_steps"]
    assert sum(row[1] for row in rows) == counters["computed_tokens"]
    assert max(row[0] for row in rows) == 2
    assert 0 < sum(row[4] for row in rows) <= repeat.wall_s
    engine.reset()
    assert engine.step_log() == []


def test_without_it_nothing_is_kept(build_engine: Callable[..., Any]) -> None:
    engine = build_engine()
    asked = [Request(request_id="a", prompt_ids=(7,), sampling=SamplingParams(max_new_tokens=2, ignore_eos=True))]
    assert "step_log" not in measure_repeat(engine, asked, None).environment


def test_replicas_are_not_logged() -> None:
    with pytest.raises(msgspec.ValidationError, match="not several replicas"):
        msgspec.convert({"step_log": True, "replicas": 2}, NativeOptions)
