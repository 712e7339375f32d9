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
    sampling = [
        SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + index)
        for index in range(len(prompts))
    ]
    made = completions(engine, prompts, sampling, go_on=go_on)
    return [OwnOutput((*prompts[index], *ids), len(prompts[index])) for index, ids in made]


def completions(
    engine: Engine,
    prompts: Seq[tuple[int, ...]],
    sampling: Seq[SamplingParams],
    *,
    go_on: Callable[[int], bool] = lambda num_done: True,
) -> list[tuple[int, tuple[int, ...]]]:
    """(index of a prompt, ids that follow it) in the order in which they ended, until `go_on(number done)` says no.

    The engine must be idle, and is so again afterwards.
    """
    for index, (prompt, how) in enumerate(zip(prompts, sampling, strict=True)):
        engine.submit(Request(request_id=str(index), prompt_ids=prompt, sampling=how))
    tokens: dict[str, list[int]] = {}
    made: list[tuple[int, tuple[int, ...]]] = []
    while engine.has_work and go_on(len(made)):
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                made.append((int(event.request_id), tuple(tokens.pop(event.request_id))))
    engine.reset()
    return made
