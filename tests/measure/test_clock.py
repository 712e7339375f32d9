from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from infermix.measure import clock

ROOT = Path(__file__).resolve().parents[2]
#: The second file runs in other environments, without InferMix.
ALLOWED = {"harness/infermix/measure/clock.py", "harness/infermix/toolkit/isolated_worker.py"}
#: Functions that read the time, however they were imported.
READS_TIME = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"}
READS_DATE = {"now", "utcnow", "today"}


def time_readings(source: str) -> list[int]:
    """Lines that import `time`, or ask `datetime` for the present."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name in ("time", "timeit") for alias in node.names):
            found.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "timeit"):
            found.append(node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if node.func.attr in READS_DATE and re.fullmatch(r"(datetime\.)?(datetime|date)", owner):
                found.append(node.lineno)
            if node.func.attr in READS_TIME and owner == "time":
                found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import time\ntime.sleep(1)", [1]),
        ("from time import perf_counter as p", [1]),
        ("from datetime import datetime\ndatetime.now()", [2]),
        ("import datetime\ndatetime.date.today()", [2]),
        ("from infermix.measure.clock import now_ns\nnow_ns()\nevent.time_ns", []),
        ("def f(now): return now.time()", []),
    ],
)
def test_the_house_test_sees_what_it_looks_for(source: str, lines: list[int]) -> None:
    assert time_readings(source) == lines


def test_only_the_clock_reads_the_time() -> None:
    offenders = []
    for root in ("harness", "kernels", "plugins"):
        for path in sorted((ROOT / root).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name not in ALLOWED:
                offenders += [f"{name}:{line}" for line in time_readings(path.read_text())]
    assert offenders == []


def test_now_goes_forward_and_sleep_reaches_its_end() -> None:
    start = clock.now_ns()
    clock.sleep_until(start + 2_000_000)
    assert clock.now_ns() >= start + 2_000_000
    clock.sleep_until(start)  # past: returns at once


def test_the_stamp_is_utc_in_whole_seconds() -> None:
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", clock.utc_stamp())
