"""A corpus as token ids of an engine's own tokenizer."""

from __future__ import annotations

from pathlib import Path

from infermix.errors import UserError
from infermix.roles.engine import Engine, Tokenizer
from infermix.toolkit.corpus import Corpus, read_corpus


def require_tokenizer(engine: Engine, evaluator: str) -> Tokenizer:
    """Raises `UserError` for a model without one (random weights have no text to be judged on)."""
    if engine.tokenizer is None:
        raise UserError(
            "this model has no tokenizer, so text cannot be scored",
            key=f"quality.{evaluator}",
            hint="use a model with real weights and its tokenizer, or leave quality out",
        )
    return engine.tokenizer


def corpus_tokens(name: str, base: Path, tokenizer: Tokenizer, num_tokens: int | None) -> tuple[Corpus, list[int]]:
    """The corpus and its first `num_tokens` token ids (`None`: all), without the tokenizer's BOS.

    Raises `UserError` when the corpus holds fewer tokens than that.
    """
    corpus = read_corpus(name, base)
    ids = tokenizer.encode(corpus.text)
    if ids and ids[0] == tokenizer.bos_token_id:
        ids = ids[1:]
    if num_tokens is not None and len(ids) < num_tokens:
        raise UserError(
            f"the corpus has {len(ids)} tokens, but {num_tokens} are asked for",
            where=name,
            hint="ask for fewer tokens or give a longer text",
        )
    return corpus, list(ids[:num_tokens])
