"""Calibration data as a stated input: which text, which windows of it. Imports no torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

from msgspec import Meta

from infermix.errors import UserError
from infermix.roles.component import Options
from infermix.roles.quantizer import QuantizerOptions
from infermix.toolkit.corpus import PYDOC_TOPICS, check_corpus, read_corpus

_KEY = "parts.quantizer.calibration"


class CalibrationOptions(Options, frozen=True, kw_only=True):
    """Windows of a text, drawn without replacement from those that start behind `first_token`."""

    corpus: Annotated[
        str, Meta(description=f"text file relative to the experiment, or {PYDOC_TOPICS}, which ships with Python")
    ] = PYDOC_TOPICS
    num_samples: Annotated[int, Meta(ge=1, description="windows of the text", extra={"unit": "samples"})] = 64
    sample_tokens: Annotated[int, Meta(ge=2, description="length of a window", extra={"unit": "tokens"})] = 512
    first_token: Annotated[
        int,
        Meta(
            ge=0,
            description="tokens at the start of the corpus that are not drawn from, left for the evaluators",
            extra={"unit": "tokens"},
        ),
    ] = 8192
    #: Not below 0: Python draws the same with a seed and its negative.
    seed: Annotated[int, Meta(ge=0, description="draws the windows")] = 0


Calibration = Annotated[CalibrationOptions, Meta(description="text that activations are measured on")]


class CalibratedOptions(QuantizerOptions, frozen=True, kw_only=True):
    """Base of the options of a quantizer that looks at activations."""

    calibration: Calibration = CalibrationOptions()

    @property
    def calibrates(self) -> bool:
        """Whether these options really need calibration data."""
        return True

    def check(self, base: Path) -> None:
        if self.calibrates:
            check_corpus(self.calibration.corpus, base)


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class CalibrationData:
    """`samples` are token-id lists of equal length; `facts` say for the record where they come from."""

    samples: tuple[tuple[int, ...], ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return samples_digest(self.samples)


def samples_digest(samples: Sequence[Sequence[int]]) -> str:
    """sha256 of the token ids."""
    text = "\n".join(",".join(map(str, sample)) for sample in samples)
    return hashlib.sha256(text.encode()).hexdigest()


def draw_calibration(
    options: CalibrationOptions,
    tokenizer: Encoder | None,
    *,
    vocab_size: int,
    max_tokens: int,
    base: Path,
    key: str = _KEY,
) -> CalibrationData:
    """The samples that `options` describe.

    Without a tokenizer (dummy weights) ids are uniform random numbers below `vocab_size`, and `facts` say so. Raises
    `UserError` when the corpus cannot be read or is too short, or a sample exceeds `max_tokens`; `key` is where the
    options stand.
    """
    if options.sample_tokens > max_tokens:
        raise UserError(
            f"samples of {options.sample_tokens} tokens are longer than the {max_tokens} positions of the model",
            key=f"{key}.sample_tokens",
        )
    if tokenizer is None:
        return _data(_random_samples(options, vocab_size), {"corpus": "random token ids: the model has no tokenizer"})
    corpus = read_corpus(options.corpus, base)
    ids = tokenizer.encode(corpus.text)
    facts = {"corpus": corpus.label, "corpus_sha256": corpus.sha256, "corpus_tokens": len(ids)}
    return _data(_windows(options, ids, key), facts)


def _data(samples: tuple[tuple[int, ...], ...], facts: dict[str, Any]) -> CalibrationData:
    sizes = {"num_samples": len(samples), "sample_tokens": len(samples[0])}
    return CalibrationData(samples, {**facts, **sizes, "token_ids_sha256": samples_digest(samples)})


def _windows(options: CalibrationOptions, ids: Sequence[int], key: str) -> tuple[tuple[int, ...], ...]:
    length = options.sample_tokens
    starts = range(options.first_token, len(ids) - length + 1, length)
    if len(starts) < options.num_samples:
        raise UserError(
            f"the corpus {options.corpus} has {len(ids)} tokens: from token {options.first_token} on, "
            f"{len(starts)} windows of {length} and not {options.num_samples}",
            key=f"{key}.num_samples",
            hint="lower num_samples, sample_tokens or first_token, or give a longer text",
        )
    drawn = sorted(random.Random(options.seed).sample(starts, options.num_samples))
    return tuple(tuple(ids[start : start + length]) for start in drawn)


def _random_samples(options: CalibrationOptions, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    draw = random.Random(options.seed)
    return tuple(
        tuple(draw.randrange(vocab_size) for _ in range(options.sample_tokens)) for _ in range(options.num_samples)
    )
