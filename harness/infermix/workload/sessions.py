"""Multi-turn sessions with growing prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from infermix.errors import UserError
from infermix.roles.workload import WorkloadContext
from infermix.workload.assemble import Prompt, stream
from infermix.workload.components import bounds
from infermix.workload.synthetic import draw_length, ordinary_tokens
from infermix.workload.trace_components import SessionsOptions


class SessionSource:
    """Turns of a session in order, session after session.

    Raises `UserError` when the last turn of a longest session could exceed the model.
    """

    def __init__(self, options: SessionsOptions, context: WorkloadContext) -> None:
        shortest = options.system_tokens + bounds(options.input_tokens)[0]
        longest = options.max_request_tokens()
        self.input_tokens = (shortest, longest - bounds(options.output_tokens)[0])
        self._options, self._ordinary = options, ordinary_tokens(context)
        if longest > context.max_model_len:
            raise UserError(
                f"a session of {bounds(options.turns)[1]} turns may grow to {longest} tokens, "
                f"but a sequence of this model may have {context.max_model_len}",
                key="workload",
                hint="fewer turns, or shorter input_tokens and output_tokens",
            )

    def prompts(self, round_: int, seed: int) -> Sequence[Prompt]:
        lengths, tokens = stream(seed, round_, "lengths"), stream(seed, round_, "prompts")
        system = self._draw(tokens, self._options.system_tokens)
        prompts: list[Prompt] = []
        for _ in range(self._options.num_sessions):
            self._add_session(prompts, system, lengths, tokens)
        return prompts

    def _add_session(self, prompts: list[Prompt], history: tuple[int, ...], lengths: Random, tokens: Random) -> None:
        options, think = self._options, self._options.think_s
        for turn in range(draw_length(options.turns, lengths)):
            history += self._draw(tokens, draw_length(options.input_tokens, lengths))
            answer = self._draw(tokens, draw_length(options.output_tokens, lengths))
            pause = lengths.expovariate(1 / think) if options.think_exponential and think else think
            after = len(prompts) - 1 if turn else None
            prompts.append(Prompt(history, len(answer), after=after, think_s=pause if turn else 0.0))
            history += answer

    def _draw(self, random: Random, count: int) -> tuple[int, ...]:
        return tuple(random.choices(self._ordinary, k=count))
