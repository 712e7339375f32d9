"""Which steps wait for the host, with a host and a device that take a known time."""

from __future__ import annotations

import pytest
from infermix.engine.host_bound import HostBound, find_host_bound


class Machine:
    """Launching takes the host `launch_ms`, the first time of a size much longer; a token the device `token_ms`."""

    def __init__(self, launch_ms: float, token_ms: float) -> None:
        self.launch_ms, self.token_ms = launch_ms, token_ms
        self.now = self.device_free = 0.0
        self.runs: list[int] = []

    def run(self, size: int) -> None:
        start = self.now
        self.now += self.launch_ms if size in self.runs else 100 * self.launch_ms
        self.device_free = max(self.device_free, start) + size * self.token_ms
        self.runs.append(size)

    def wait(self) -> None:
        self.now = max(self.now, self.device_free)

    def found(self, *sizes: int) -> HostBound:
        return find_host_bound(self.run, self.wait, sizes, lambda: round(self.now * 1e6))


@pytest.mark.parametrize(
    ("token_ms", "tokens"), [(0.001, 2048), (0.01, 2048), (0.02, 1024), (0.04, 512), (0.1, 256), (1.0, 256)]
)
def test_the_largest_step_that_waits_for_the_host(token_ms: float, tokens: int) -> None:
    assert Machine(26.0, token_ms).found(256, 512, 1024, 2048).tokens == tokens


def test_launching_is_not_waiting() -> None:
    """A device that is far behind leaves the launch as short as it is, and the smallest size is kept."""
    found = Machine(10.0, 5.0).found(16, 32, 64)
    assert found.launch_s == pytest.approx(0.01)
    assert found.step_s == {32: pytest.approx(0.16)}
    assert found.tokens == 16


def test_nothing_behind_the_first_long_step_is_tried() -> None:
    machine = Machine(20.0, 0.1)
    machine.found(64, 128, 256, 512, 1024)
    assert max(machine.runs) == 256  # 25.6 ms, just beyond the margin of 25


def test_what_the_record_says() -> None:
    assert Machine(20.0, 0.1).found(128, 256).about() == {
        "tokens": 128, "launch_ms": pytest.approx(20.0), "step_ms": {"256": pytest.approx(25.6)},
    }  # fmt: skip
