"""A tokenizer that anyone can check by eye: one token per word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from infermix.errors import UserError
from infermix.roles.workload import WorkloadContext


class WordTokenizer:
    """Words get ids from 10 on, in order of appearance; 0, 1, 2 are special; chat wraps the text in 1 and 2."""

    eos_token_ids = (2,)
    bos_token_id = 1
    special_token_ids = (0, 1, 2)
    vocab_size = 60

    def __init__(self, has_template: bool = True) -> None:
        self.has_template = has_template
        self.words: list[str] = []
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        ids = []
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
            ids.append(10 + self.words.index(word))
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self.words[token - 10] for token in token_ids if token >= 10)

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not self.has_template:
            raise UserError("the tokenizer has no chat template")
        return [token for message in messages for token in (1, *self.encode(message["content"]), 2)]


@pytest.fixture
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture
def make_context(tmp_path: Path, tokenizer: WordTokenizer) -> Callable[..., WorkloadContext]:
    """A context over `tmp_path` and the word tokenizer."""

    def make(**changes: object) -> WorkloadContext:
        defaults = {"tokenizer": tokenizer, "vocab_size": 64, "max_model_len": 100, "seed": 0, "base": tmp_path}
        return WorkloadContext(**{**defaults, **changes})  # type: ignore[arg-type]

    return make
