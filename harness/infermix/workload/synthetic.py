"""Random prompts of exact lengths."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from infermix.errors import UserError
from infermix.roles.workload import WorkloadContext
from infermix.workload.assemble import Prompt, stream
from infermix.workload.components import Length, LogNormal, SyntheticOptions, bounds


class SyntheticSource:
    """Uniform draws from the ordinary tokens of the vocabulary.

    Raises `UserError` when a request could exceed the model, or when the vocabulary has no ordinary token.
    """

    def __init__(self, options: SyntheticOptions, context: WorkloadContext) -> None:
        self.input_tokens = bounds(options.input_tokens)
        self._options, self._ordinary = options, ordinary_tokens(context)
        longest = options.max_request_tokens()
        if longest > context.max_model_len:
            raise UserError(
                f"input_tokens and output_tokens add up to {longest} tokens, "
                f"but a sequence of this model may have {context.max_model_len}",
                key="workload",
            )

    def prompts(self, round_: int, seed: int) -> Sequence[Prompt]:
        options = self._options
        lengths, tokens = stream(seed, round_, "lengths"), stream(seed, round_, "prompts")
        prefixes = [self._draw(tokens, options.shared_prefix_tokens) for _ in range(options.num_prefixes)]
        prompts = []
        for index in range(options.num_requests):
            prefix = prefixes[index % len(prefixes)]
            size = draw_length(options.input_tokens, lengths) - len(prefix)
            output = draw_length(options.output_tokens, lengths)
            prompts.append(Prompt(prefix + self._draw(tokens, size), output))
        return prompts

    def _draw(self, random: Random, count: int) -> tuple[int, ...]:
        return tuple(random.choices(self._ordinary, k=count))


def ordinary_tokens(context: WorkloadContext) -> Sequence[int]:
    """Token ids that a text could contain: no end, beginning or other special token that the tokenizer names."""
    tokenizer = context.tokenizer
    if tokenizer is None:
        return range(context.vocab_size)
    special = {*tokenizer.eos_token_ids, tokenizer.bos_token_id, *getattr(tokenizer, "special_token_ids", ())}
    known = min(context.vocab_size, tokenizer.vocab_size)
    ordinary = [token for token in range(known) if token not in special]
    if not ordinary:
        raise UserError("the vocabulary has no ordinary token to draw prompts from", key="workload")
    return ordinary


def draw_length(length: Length, random: Random) -> int:
    if isinstance(length, int):
        return length
    if not isinstance(length, LogNormal):
        return random.randint(length.min, length.max)
    while True:
        drawn = round(length.median * random.lognormvariate(0, length.sigma))
        if length.min <= drawn <= length.max:
            return drawn
