"""How many tokens a step may have before the device takes longer for it than the host for launching it: measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_LAUNCHES, _STEPS = 3, 2
#: A step that waits for the host ends a little after its last launch; one that takes longer waits for the device.
_MARGIN = 1.25


@dataclass(slots=True)
class HostBound:
    """`tokens`: the largest step that waits for the host. Seconds of launching the smallest, and of whole steps."""

    tokens: int
    launch_s: float
    step_s: dict[int, float] = field(default_factory=dict)

    def about(self) -> dict[str, object]:
        """For the record."""
        steps = {str(size): seconds * 1e3 for size, seconds in self.step_s.items()}
        return {"tokens": self.tokens, "launch_ms": self.launch_s * 1e3, "step_ms": steps}


def find_host_bound(
    run: Callable[[int], None], wait: Callable[[], None], sizes: Sequence[int], clock_ns: Callable[[], int]
) -> HostBound:
    """Try `sizes` (ascending) until one takes the device longer; the first is the least that is returned.

    `run` launches an eager step of so many tokens, `wait` returns when the device is done. The best of a few rounds
    counts: what else the host does makes a launch longer, never shorter.
    """

    def seconds(size: int, rounds: int, through: Callable[[], None]) -> float:
        run(size)  # what a size compiles or allocates the first time is not its time
        taken = []
        for _ in range(rounds):
            wait()
            start = clock_ns()
            run(size)
            through()
            taken.append((clock_ns() - start) / 1e9)
        wait()
        return min(taken)

    found = HostBound(sizes[0], seconds(sizes[0], _LAUNCHES, lambda: None))
    for size in sizes[1:]:
        found.step_s[size] = seconds(size, _STEPS, wait)
        if found.step_s[size] > _MARGIN * found.launch_s:
            break
        found.tokens = size
    return found
