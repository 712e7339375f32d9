"""From exceptions and exit codes to states."""

from __future__ import annotations

import signal

import pytest
from infermix.errors import OutOfMemory, Unsupported, UserError, WrongResult
from infermix.failure import classify, from_exit


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "loading", "state", "reason"),
    [
        (MemoryError(), True, "oom", "MemoryError: no message"),
        (OutOfMemory("weights"), True, "oom", "weights"),
        (OutOfMemoryError("x"), False, "oom", "OutOfMemoryError: x"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True, "oom", "RuntimeError"),
        (RuntimeError("CUDA error: out of memory"), False, "oom", "RuntimeError"),
        (ValueError("out of memory of the past"), False, "error", "ValueError"),
        (Unsupported("no window"), True, "invalid", "no window"),
        (Unsupported("no window"), False, "error", "no window"),
        (WrongResult("logits differ"), True, "wrong", "logits differ"),
        (UserError("bad", key="a.b"), True, "error", "a.b: bad"),
        (SystemExit(3), False, "error", "SystemExit: 3"),
    ],
)
def test_exceptions(error: BaseException, loading: bool, state: str, reason: str) -> None:
    found, text = classify(error, loading=loading)
    assert found == state
    assert text.startswith(reason)


def test_killed_by_the_kernel_for_memory() -> None:
    failure = from_exit(-signal.SIGKILL, ["loading"], kernel_killed=True)
    assert (failure.state, "host ran out of memory" in failure.reason) == ("oom", True)


def test_killed_by_someone_else() -> None:
    failure = from_exit(-signal.SIGKILL, ["loading"], kernel_killed=False)
    assert failure.state == "error"
    assert "SIGKILL; last output: loading" in failure.reason


def test_an_allocator_that_aborts_is_out_of_memory() -> None:
    failure = from_exit(-signal.SIGABRT, ["a", "terminate called", "what():  std::bad_alloc"], kernel_killed=False)
    assert failure.state == "oom"


def test_memory_words_far_above_are_not_the_cause() -> None:
    log = ["checking for out of memory", "b", "c", "d"]
    assert from_exit(1, log, kernel_killed=False).state == "error"
