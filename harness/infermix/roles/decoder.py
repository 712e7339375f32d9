"""Role: decoder (decoding strategy). Turns a plan into tokens; two halves so that host work overlaps device work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from infermix.roles.request import Sequence
    from infermix.roles.scheduler import Plan


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens that one sequence gained in one step, in order."""

    sequence: Sequence
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """What a forward returns beside the last-row logits: `all_logits` rows, hidden states of some layers, scores."""

    all_logits: bool = False
    hidden_layers: tuple[int, ...] = ()
    attention_scores: bool = False


@dataclass(slots=True)
class Forward:
    """`logits [R, V]` on the device. Row i belongs to `sequences[i]`, whose lane is `lanes[i]` (int64, device).

    With `all_logits` a sequence has one row per new token, in order.
    """

    logits: Tensor
    sequences: list[Sequence]
    lanes: Tensor
    hidden: dict[int, Tensor] | None = None


class Runner(Protocol):
    """The model, driven by a plan."""

    def forward(self, plan: Plan, want: Want = Want()) -> Forward:
        """Rows come back only for sequences whose last known token is processed by this step."""
        ...


class Sampler(Protocol):
    def sample(self, forward: Forward) -> Tensor:
        """Token ids `[R]` int64 on the device; they are also kept there as the next input of each sequence.

        The draw of a sequence depends on its request's seed and the token's position alone.
        """
        ...


class Decoder(Protocol):
    """May say `query_lens: tuple[int, ...]`, the uniform query lengths of its steps that are worth a captured graph.

    Without it, `(1,)`: one token per sequence. A verification row of n drafts has query length n + 1.
    """

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> Any:
        """Queue the device work of a step without waiting for it; returns a ticket."""
        ...

    def collect(self, ticket: Any) -> list[Emission]:
        """Wait for the step's sampled ids (the only host read) and hand them over."""
        ...
