"""Work of a decoder's own that has few shapes, so that it can be replayed from graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from infermix.roles.decoder import Captured

#: Graphs of one kind of work, at most: each takes a tenth of a second or so to capture.
MOST_GRAPHS = 12


class Replayed:
    """`work(*shape)` of those that inherit, over what lies in one place on the device.

    Until `capture_all` it is launched operator by operator, from then on replayed.
    """

    def __init__(self, every: Iterable[tuple[int, ...]]) -> None:
        """`every` shape that is asked for."""
        self._every = sorted(every, reverse=True)
        self._captured: dict[tuple[int, ...], Captured] = {}

    def capture_all(self, capture: Callable[[Callable[[], Any]], Captured]) -> Iterator[float]:
        """Capture every shape, the largest first so that the others reuse its memory; yields the fraction done.

        Raises `Unsupported` where the work cannot be captured.
        """
        for done, shape in enumerate(self._every):
            self._captured[shape] = capture(partial(self.work, *shape))
            yield (done + 1) / len(self._every)

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def launch(self) -> None:
        """Launch everything from here on, also what was captured."""
        self._captured.clear()

    def run(self, *shape: int) -> Any:
        """What the work of this shape returns, to be read before the next run."""
        if not self._captured:
            return self.work(*shape)
        captured = self._captured[shape]
        captured.replay()
        return captured.result

    def work(self, *shape: int) -> Any:
        raise NotImplementedError


def powers(first: int, last: int) -> tuple[int, ...]:
    """`first` times powers of two below `last`, and `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def thinned(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Every other one, the smallest and the largest among them."""
    return tuple(sorted({sizes[0], *sizes[::-2]}))


def holding(sizes: tuple[int, ...], count: int) -> int:
    """The smallest of ascending `sizes` that holds so many."""
    return next(size for size in sizes if size >= count)
