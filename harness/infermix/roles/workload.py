"""Role: workload. Requests with arrivals, drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from infermix.roles.component import Options

if TYPE_CHECKING:
    from pathlib import Path

    from infermix.roles.engine import Tokenizer
    from infermix.roles.request import Request


class WorkloadOptions(Options, frozen=True, kw_only=True):
    """Base of workload options: what `plan` may ask without drawing a request."""

    def max_request_tokens(self) -> int | None:
        """Upper bound of prompt + output tokens of one request; `None` when only the data tells."""
        return None

    def max_in_flight(self) -> int | None:
        """Upper bound of requests in flight at once; `None` when unbounded."""
        return None

    def check(self, base: Path) -> None:
        """Read the files that the options name, relative to `base`, before anything runs.

        Raises `UserError` for one that is missing or holds bad data, with file and line where there is one. What
        needs a tokenizer is left to the run.
        """


@dataclass(frozen=True, kw_only=True)
class WorkloadContext:
    """`tokenizer` is `None` for dummy models; `base` is the folder that relative paths of the YAML start from."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    seed: int
    base: Path


class Workload(Protocol):
    """Optional attribute: `counts: Mapping[str, float]`, figures for the record, such as rows that were left out."""

    #: Closed loop: this many requests (sessions, where they have turns) are kept in flight; `None` means that
    #: `arrival_s` decides (open loop).
    concurrency: int | None

    def requests(self, repeat: int) -> Sequence[Request]:
        """The requests of one repeat, in order of arrival; the same repeat always gives the same ones."""
        ...
