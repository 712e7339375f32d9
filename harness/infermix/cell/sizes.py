"""How long a sequence and how many of them the engine of a cell must be ready for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from infermix.errors import UserError
from infermix.fitting import rows_per_sequence
from infermix.roles.component import Role
from infermix.roles.evaluator import EvaluatorOptions

if TYPE_CHECKING:
    from infermix.compose import CellPlan
    from infermix.roles.component import Choice
    from infermix.roles.request import Request

#: Sequences in flight where neither scheduler nor workload bounds them.
DEFAULT_MAX_NUM_SEQS = 256
#: Room for an evaluator when only its data tells how long its sequences are.
UNTOLD_TOKENS = 2048


def longest_allowed(plan: CellPlan) -> int:
    """Tokens of the longest sequence that the model, and `limits.max_model_len`, admit."""
    assert plan.facts is not None
    positions = plan.facts.max_position_embeddings
    limit = plan.cell.experiment.limits.max_model_len
    return min(positions, limit) if limit else positions


def request_tokens(request: Request) -> int:
    """Prompt and the most output tokens of one request."""
    return len(request.prompt_ids) + request.sampling.max_new_tokens


def check_requests(requests: Iterable[Request], allowed: int) -> None:
    """Refuse an empty prompt and a request that does not fit, by name."""
    for request in requests:
        if not request.prompt_ids:
            raise UserError(f"request {request.request_id!r} has an empty prompt", key="workload")
        if request_tokens(request) > allowed:
            raise UserError(
                f"request {request.request_id!r} needs {len(request.prompt_ids)} prompt and "
                f"{request.sampling.max_new_tokens} new tokens, but a sequence may have {allowed}",
                key="workload",
                hint="the bound is the model's positions or limits.max_model_len",
            )


def max_model_len(plan: CellPlan, requests: Iterable[Request], evaluators: Sequence[Choice]) -> int:
    """Tokens of the longest sequence that workload and evaluators will ask for.

    An evaluator whose options do not tell gets `UNTOLD_TOKENS`, or what the model allows. Raises `UserError` when one
    asks for more than that.
    """
    allowed = longest_allowed(plan)
    needed = max((request_tokens(request) for request in requests), default=1)
    for choice in evaluators:
        tokens = _evaluator_tokens(choice, allowed)
        if tokens > allowed:
            raise UserError(
                f"{choice.component.name} reads {tokens} tokens at once, but a sequence may have {allowed}",
                key="quality",
                hint="the bound is the model's positions or limits.max_model_len",
            )
        needed = max(needed, tokens)
    return min(needed, allowed)


def _evaluator_tokens(choice: Choice, allowed: int) -> int:
    declared = choice.options.max_tokens() if isinstance(choice.options, EvaluatorOptions) else None
    return min(UNTOLD_TOKENS, allowed) if declared is None else declared


def max_num_seqs(
    choices: Mapping[Role, Choice], concurrency: int | None, num_requests: int, num_outputs: int = 1
) -> int:
    """The smallest of what scheduler and engine admit, what the workload keeps in flight, and what there is.

    Every output of a request is a sequence; a decoder that searches computes rows of its own for each request.
    """
    rows = rows_per_sequence(choices)
    each = num_outputs if rows == 1 else 1
    owners = [choices[role].options for role in (Role.SCHEDULER, Role.ENGINE) if role in choices]
    asked = [getattr(owner, name, None) for owner in owners for name in ("max_num_seqs", "batch_size")]
    bounds = [bound for bound in (*asked, (concurrency or 0) * each) if bound] or [DEFAULT_MAX_NUM_SEQS]
    return rows * max(1, min(*bounds, num_requests * each) if num_requests else min(bounds))
