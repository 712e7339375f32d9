"""Texts of a model's own: what it makes of prompts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from infermix.roles.request import Request, SamplingParams
from infermix.roles.training import OwnOutput

if TYPE_CHECKING:
    from infermix.roles.engine import Engine


def own_outputs(
    engine: Engine,
    prompts: Seq[tuple[int, ...]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    go_on: Callable[[int], bool] = lambda num_done: True,
) -> list[OwnOutput]:
    """Texts in the order in which they ended, until `go_on(number done)` says no; the others are left out.

    The engine must be idle, and is so again afterwards.
    """
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + index)
        engine.submit(Request(request_id=str(index), prompt_ids=prompt, sampling=sampling))
    tokens: dict[str, list[int]] = {}
    made: list[OwnOutput] = []
    while engine.has_work and go_on(len(made)):
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                prompt = prompts[int(event.request_id)]
                made.append(OwnOutput((*prompt, *tokens.pop(event.request_id)), len(prompt)))
    engine.reset()
    return made
