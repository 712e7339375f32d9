"""Errors that InferMix raises on purpose.

`UserError` is for what a user wrote (YAML, options, checkpoints, traces, records). It names the place, the
value, and what would be right. Our own invariants use `assert`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InfermixError(Exception):
    """Root of every error of this package."""


class UserError(InfermixError):
    """Something that a user wrote is wrong.

    `where` is `file:line:column` (as much of it as is known), `key` the dotted path inside the file.
    """

    def __init__(
        self, message: str, *, where: str | None = None, key: str | None = None, hint: str | None = None
    ) -> None:
        self.message, self.where, self.key, self.hint = message, where, key, hint
        super().__init__(message)

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.where, self.key) if part)
        text = f"{place}: {self.message}" if place else self.message
        return f"{text} ({self.hint})" if self.hint else text


class UserErrors(UserError):
    """Several faults of one input, reported together."""

    def __init__(self, errors: Iterable[UserError]) -> None:
        self.errors = tuple(errors)
        assert self.errors
        super().__init__("\n".join(str(error) for error in self.errors))


class Unsupported(InfermixError):
    """A part was handed something that it does not implement; raised instead of ignoring it."""


class WrongResult(Unsupported):
    """A part ran and computed something else than it must; the state of the row is `wrong`."""


class OutOfMemory(InfermixError):
    """The device or host memory does not hold what was asked for."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """A hint such as "did you mean 'paged'? known: dense, paged"; `None` without candidates."""
    names = sorted(known)
    if not names:
        return None
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listing = "known: " + ", ".join(names)
    return f"did you mean {close[0]!r}? {listing}" if close else listing
