"""What decoders put beside the target: the memory that it takes, and why it does not fit. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from infermix.cost.kv import kv_bytes_per_token
from infermix.cost.roofline import weight_bytes_stored
from infermix.errors import UserError
from infermix.fitting import Second
from infermix.plugins import Catalogue
from infermix.roles.component import Choice, Role
from infermix.roles.decoder import DecoderOptions, SecondModelUse
from infermix.roles.facts import ModelFacts
from infermix.spec.experiment import ModelSource


class Drafts:
    """`model_of(source, base)` reads a model's facts, `with_dtype(facts, dtype)` gives the same ones in a dtype."""

    def __init__(
        self,
        catalogue: Catalogue,
        model_of: Callable[[ModelSource, Path], ModelFacts],
        with_dtype: Callable[[ModelFacts, str], ModelFacts],
    ) -> None:
        self._catalogue, self._model_of, self._with_dtype = catalogue, model_of, with_dtype

    def beside(self, decoders: Sequence[Choice], base: Path, facts: ModelFacts) -> tuple[Second | None, list[str]]:
        """The model beside the target, and one sentence for each reason why decoders do not fit the target.

        `decoders` stand inside one another; one of them at most has such a model. Raises `UserError` when it cannot
        be found or read.
        """
        second: Second | None = None
        problems: list[str] = []
        for choice in decoders:
            if isinstance(choice.options, DecoderOptions):
                title = f"decoder {choice.component.name!r}"
                problems += [f"{title}: {each}" for each in choice.options.misfits(facts)]
                use = choice.options.second_model()
                if use is not None:
                    other = facts if use.source is None else self._draft_model(use.source, base)
                    problems += [f"{title}: {each}" for each in _unfit(use, other, facts)]
                    second = self._sized(use, self._with_dtype(other, facts.dtype))
        return second, problems

    def _sized(self, use: SecondModelUse, facts: ModelFacts) -> Second:
        weights = 0 if use.shares_weights else round(weight_bytes_stored(facts, self._draft_bits(use)))
        return Second(weights, kv_bytes_per_token(facts))

    def _draft_model(self, source: str, base: Path) -> ModelFacts:
        try:
            return self._model_of(ModelSource(source=source), base)
        except UserError as error:
            message = error.message if error.where is None else f"{error.where}: {error.message}"
            raise UserError(message, key="parts.decoder.draft", hint=error.hint) from error

    def _draft_bits(self, use: SecondModelUse) -> float | None:
        if use.quantizer is None:
            return None
        try:
            component = self._catalogue.find(Role.QUANTIZER, use.quantizer).component
        except UserError as error:
            raise UserError(error.message, key="parts.decoder.draft_quantizer", hint=error.hint) from error
        try:
            return component.weight_bits(msgspec.convert(use.quantizer_options or {}, component.options))
        except msgspec.ValidationError as error:
            key = "parts.decoder.draft_quantizer_options"
            raise UserError(f"options of quantizer {use.quantizer!r}: {error}", key=key) from error


def _unfit(use: SecondModelUse, draft: ModelFacts, target: ModelFacts) -> Iterator[str]:
    """Whether tokenizers agree shows when both are loaded."""
    if use.source is None:
        return
    if draft.vocab_size != target.vocab_size:
        yield (
            f"the draft model {use.source} has {draft.vocab_size} tokens in its vocabulary, the target "
            f"{target.vocab_size}"
        )
    if draft.refusal:
        yield f"the draft model {use.source}: {draft.refusal}"
    if "model:bidirectional" in draft.features:
        yield f"the draft model {use.source} fills in masks and predicts no next token"
