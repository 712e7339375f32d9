"""Rounds of an EAGLE drafter that are watched while an engine runs, and a capture without a device."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from infermix.roles.decoder import Captured
from infermix_decoders.eagle_rounds import PlainRounds
from torch import Tensor

EAGLE = ("eagle", {"heads": "eagle", "num_draft_tokens": 14, "depth": 3, "beam": 4})


def lists_of(trees: Tensor) -> list[Any]:
    return trees.tolist()


@dataclass
class Compared:
    """Hands on what `rounds` say, once it is compared with what `other` says of the same rows.

    Neither may change the cache. `batches` and `counts` are those of the rounds so far, `different` how many trees
    were not the same.
    """

    rounds: Any
    other: Any
    cache: Any
    batches: list[int] = field(default_factory=list)
    counts: list[tuple[int, ...]] = field(default_factory=list)
    different: int = 0

    @property
    def guess(self) -> Any:
        return self.rounds.guess

    @property
    def trees(self) -> int:
        return sum(self.batches)

    def __call__(self, lanes: Seq[int], counts: Seq[int], positions: Seq[int]) -> Tensor:
        before = self.cache.keys.clone(), self.cache.values.clone()
        found = self.rounds(lanes, counts, positions).clone()
        others = lists_of(self.other(lanes, counts, positions))
        assert all(was.equal(now) for was, now in zip(before, (self.cache.keys, self.cache.values), strict=True))
        self.different += sum(one != two for one, two in zip(lists_of(found), others, strict=True))
        self.batches.append(len(lanes))
        self.counts.append(tuple(counts))
        return found


def compare(engine: Any, make_other: Callable[[Any], Any]) -> Compared:
    """From now on `engine` runs every round twice; `make_other(guess)` makes the others."""
    drafter = engine._decoder._drafter
    rounds = drafter._rounds
    drafter._rounds = Compared(rounds, make_other(rounds.guess), drafter._cache)
    return drafter._rounds


def plain_rounds(guess: Any) -> PlainRounds:
    return PlainRounds(guess, guess._latest.device)


def count_runs(work: Any) -> list[tuple[int, ...]]:
    """Shapes that replayed work is run with from now on."""
    shapes, run = [], work.run

    def watched(*shape: int) -> Any:
        shapes.append(shape)
        return run(*shape)

    work.run = watched
    return shapes


class Recorder:
    """A capture that a CPU can do: replaying runs the work again and puts its result where the first one lies."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, work: Callable[[], Tensor | None]) -> Captured:
        found = work()
        result = None if found is None else found.clone()
        self.captured += 1

        def replay() -> None:
            found = work()
            if result is not None and found is not None:
                result.copy_(found)
            self.replayed += 1

        return Captured(replay, result)
